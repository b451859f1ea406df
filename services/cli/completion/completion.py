"""`isthmus completion`: a script that lets a shell complete commands, flags and their choices."""

from dataclasses import dataclass
from typing import Literal

from services.cli.commands import COMMANDS, config_of
from services.cli.completion import bash, fish, zsh
from services.cli.completion.words import words_of
from services.settings.flags import describe, load, setting

_SCRIPTS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
_OTHERS = ("help", "--help", "--version")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionConfig:
    """Print what a shell needs to complete this command.

    bash: isthmus completion bash > ~/.local/share/bash-completion/completions/isthmus
    zsh:  isthmus completion zsh > "${fpath[1]}/_isthmus"
    fish: isthmus completion fish > ~/.config/fish/completions/isthmus.fish
    """

    shell: Literal["bash", "zsh", "fish"] = setting(help="whose", positional=True)


def run(argv: list[str]) -> int:
    config = load(CompletionConfig, argv, prog="isthmus completion")
    commands = [words_of(name, each.meaning, describe(config_of(name))) for name, each in COMMANDS.items()]
    print(_SCRIPTS[config.shell](commands, _OTHERS), end="")
    return 0
