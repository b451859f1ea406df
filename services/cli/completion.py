"""`isthmus completion` prints a script that lets a shell complete commands, flags and their choices.

shtab generates the script from an argparse parser that has every command as a subparser.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import shtab

from services.cli.commands import COMMANDS, config_of
from services.settings.flags import FlagDescription, describe, load, setting


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
    described = {name: describe(config_of(name)) for name in COMMANDS}
    print(script(config.shell, {name: each.meaning for name, each in COMMANDS.items()}, described))
    return 0


def script(
    shell: str, meanings: Mapping[str, str], described: Mapping[str, Iterable[FlagDescription]]
) -> str:
    parser = argparse.ArgumentParser(prog="isthmus")
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers()
    for name, meaning in meanings.items():
        command = commands.add_parser(name, help=meaning)
        for each in described[name]:
            _add(command, each)
    commands.add_parser("help", help="of a command").add_argument("command", choices=[*meanings])
    return shtab.complete(parser, shell)


def _add(command: argparse.ArgumentParser, each: FlagDescription) -> None:
    value: dict[str, Any] = {"choices": each.choices or None}
    if not each.positional:
        alone = each.choices == ("true", "false")
        about = {"action": "store_true"} if alone else value
        _completed(command.add_argument(f"--{each.name}", help=each.help.replace("%", "%%"), **about), each)
    if each.positional or each.bare:
        name = each.name.lower() if each.positional else each.bare
        _completed(command.add_argument(name, nargs="?", help=each.help.replace("%", "%%"), **value), each)


def _completed(argument: argparse.Action, each: FlagDescription) -> None:
    if each.hint == "PATH":
        argument.complete = shtab.FILE  # type: ignore[attr-defined]
