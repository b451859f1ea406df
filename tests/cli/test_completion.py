"""These tests show what a shell offers. bash is asked itself; zsh's and fish's scripts are read."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.cli import completion
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


MEANINGS = {"up": "start one", "ask": "ask it", "completion": "of a shell"}
DESCRIBED = {name: describe(cls) for name, cls in zip(MEANINGS, (Up, Ask, Completion), strict=True)}
FLAGS = ["-h", "--model", "--port", "--page", "--logs", "--tls-ca", "--help"]
OFFERED = [
    ([""], ["up", "ask", "completion", "help"]),
    (["-"], ["-h", "--help", "--version"]),
    (["co"], ["completion"]),
    (["help", ""], ["up", "ask", "completion"]),
    (["up", "-"], FLAGS),
    (["up", "--p"], ["--port", "--page"]),
    (["up", "--page", ""], ["on", "off"]),
    (["up", "--page", "of"], ["off"]),
    (["up", "--page", "on", "--l"], ["--logs"]),
    (["up", "--port", ""], []),
    (["up", ""], ["a model", "file.pem"]),
    (["up", "--logs", "f"], ["file.pem"]),
    (["up", "--tls-ca", ""], ["a model", "file.pem"]),
    (["ask", "-"], ["-h", "--text", "--chat", "--help"]),
    (["ask", "he"], []),
    (["completion", ""], ["bash", "zsh"]),
]
# Each line has the words that are typed so far.
ASK = """
while IFS= read -r line; do
    IFS='|' read -ra words <<< "$line|."
    unset 'words[-1]'
    COMP_WORDS=(isthmus "${words[@]}")
    COMP_CWORD=${#words[@]}
    _shtab_isthmus
    (IFS='|'; printf '%s\\n' "${COMPREPLY[*]}")
done
"""


def test_bash_completes(tmp_path):
    (tmp_path / "a model").mkdir()
    (tmp_path / "file.pem").touch()
    script = completion.script("bash", MEANINGS, DESCRIBED) + ASK
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
    told = completion.script("zsh", MEANINGS, DESCRIBED)
    assert told.startswith("#compdef isthmus\n") and "up:'start one'" in told
    assert '"--page[a page]:page:(on off)"' in told and '"--tls-ca[PEM]:tls_ca:_files"' in told
    assert r'"--port[where it\'s\: \[here\]]:port:"' in told and '"--logs[show them]"' in told
    assert '":whose:(bash zsh)"' in told
    told = completion.script("fish", MEANINGS, DESCRIBED)
    up = "complete -c isthmus -n '_shtab_isthmus_using up'"
    assert f"{up} -l page -xka \"on off\" -d 'a page'" in told and f"{up} -l logs -d 'show them'" in told
    assert f'{up} -l tls-ca -xka "(__fish_complete_path' in told and f"{up} -l port -x -d" in told


def test_the_command_s_own_script_is_bash(capsys, monkeypatch):
    light = {name: each for name, each in completion.COMMANDS.items() if name in ("generate", "completion")}
    monkeypatch.setattr(completion, "COMMANDS", light)
    assert completion.run(["bash"]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, timeout=30, check=True)
    assert "_shtab_isthmus_generate_option_strings=(" in script and "--temperature" in script
