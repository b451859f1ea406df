"""What a shell offers. bash is asked itself; zsh's and fish's scripts are read."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.cli.completion import bash, completion, fish, zsh
from services.cli.completion.words import words_of
from services.settings.flags import describe, setting


@dataclass(frozen=True)
class Up:
    model: Path = setting(help="which", bare="MODEL")
    port: int = setting(7, "where it's: [here]")
    page: Literal["on", "off"] = setting("on", "a page")
    logs: bool = setting(False, "show them")
    tls_ca: Path | None = setting(None, "PEM")


@dataclass(frozen=True)
class Ask:
    text: str = setting("", "what", bare="TEXT")
    chat: bool = setting(False, "as a chat")


@dataclass(frozen=True)
class Completion:
    shell: Literal["bash", "zsh"] = setting(help="whose", positional=True)


COMMANDS = [
    words_of("up", "start one", describe(Up)),
    words_of("ask", "ask it", describe(Ask)),
    words_of("completion", "of a shell", describe(Completion)),
]
FLAGS = ["--model=", "--port=", "--page=", "--logs", "--tls-ca=", "--help"]


OFFERED = [
    ([""], ["up", "ask", "completion", "help", "--version"]),
    (["co"], ["completion"]),
    (["help", ""], ["up", "ask", "completion"]),
    (["up", "--"], FLAGS),
    (["up", "--p"], ["--port=", "--page="]),
    (["up", "--page", "="], ["on", "off"]),
    (["up", "--page", "=", "of"], ["off"]),
    (["up", "--page", "o"], ["on", "off"]),
    (["up", "--page", "=", "on", "--l"], ["--logs"]),
    (["up", "--port", "=", ""], []),
    (["up", ""], ["a model", "file.pem"]),
    (["up", "f"], ["file.pem"]),
    (["up", "--tls-ca", "=", ""], ["a model", "file.pem"]),
    (["ask", ""], ["--text=", "--chat", "--help"]),
    (["ask", "he"], []),
    (["completion", ""], ["bash", "zsh"]),
]
# Of each line the words typed so far; bash gives those at `=` apart.
ASK = """
while IFS= read -r line; do
    IFS='|' read -ra words <<< "$line|."
    unset 'words[-1]'
    COMP_WORDS=(isthmus "${words[@]}")
    COMP_CWORD=${#words[@]}
    _isthmus
    (IFS='|'; printf '%s\\n' "${COMPREPLY[*]}")
done
"""


def test_bash_completes(tmp_path):
    (tmp_path / "a model").mkdir()
    (tmp_path / "file.pem").touch()
    script = bash.script(COMMANDS, ["help", "--version"]) + ASK
    typed = "".join("|".join(words) + "\n" for words, _ in OFFERED)
    command = ["bash", "--norc", "-c", script]
    ended = subprocess.run(
        command, cwd=tmp_path, input=typed, capture_output=True, text=True, timeout=60, check=True
    )
    seen = [sorted(filter(None, line.split("|"))) for line in ended.stdout.splitlines()]
    assert list(zip([words for words, _ in OFFERED], seen, strict=True)) == [
        (words, sorted(offered)) for words, offered in OFFERED
    ]
    assert ended.stderr == ""


def test_zsh_and_fish_are_told_the_same():
    told = zsh.script(COMMANDS, ["help"])
    assert told.startswith("#compdef isthmus\n") and "'up:start one'" in told
    # As a file of $fpath it is run at once: who only defined there would offer nothing to the first TAB.
    assert told.splitlines()[-1].startswith('if [[ $funcstack[1] == _isthmus ]]; then _isthmus "$@"; else')
    assert "'--page=[a page]:value:(on off)'" in told and "'--tls-ca=[PEM]:value:_files'" in told
    assert r"'--port=[where it'\''s\: \[here\]]:value: '" in told
    assert (
        "'--logs[show them]'" in told
        and "completion) _arguments '--help[show all flags]' '1:value:(bash zsh)'" in told
    )
    told = fish.script(COMMANDS, ["help"])
    up = "complete -c isthmus -n '__fish_seen_subcommand_from up'"
    assert f"{up} -l page -x -a 'on off' -d 'a page'" in told and f"{up} -l tls-ca -r -F -d 'PEM'" in told
    assert f"{up} -l logs -d 'show them'" in told and rf"{up} -l port -x -d 'where it\'s: [here]'" in told


def test_the_command_s_own_script_is_bash(capsys, monkeypatch):
    light = {name: each for name, each in completion.COMMANDS.items() if name in ("generate", "completion")}
    monkeypatch.setattr(completion, "COMMANDS", light)
    assert completion.run(["bash"]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, timeout=30, check=True)
    assert "generate)" in script and "--temperature=" in script
