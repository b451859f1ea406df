"""What the command `isthmus` answers where it cannot do what it is asked: a sentence and an exit code."""

import io
import os
import subprocess
import sys
from importlib import metadata

import pytest

from services.cli import __main__ as isthmus
from services.cli import client, commands
from services.cli.local import up
from services.cli.local.cluster import LocalCluster
from services.settings.flags import load
from services.values.errors import ConfigError, InvalidRequest, Unavailable

NOWHERE = "--router=127.0.0.1:1"


@pytest.fixture
def isthmus_command(monkeypatch, capsys):
    """Run the command in this process; (exit code, standard output, standard error)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["isthmus", *arguments])
        with pytest.raises(SystemExit) as ended:
            isthmus.main()
        return ended.value.code, *capsys.readouterr()

    monkeypatch.setattr(isthmus.log_lines, "setup_logging", lambda *settings: None)
    return command


@pytest.mark.parametrize(
    "arguments,code,sentence",
    [
        (("generate", "--seed=-1", "--prompt=x", NOWHERE), 2, "--seed"),
        (("generate", "--max-tokens=9999999999", "--prompt=x", NOWHERE), 2, "--max-tokens"),
        (("generate", "--prompt=\udcff", NOWHERE), 2, "--prompt"),  # as Python passes a byte 0xff
        (
            ("generate", "--prompt=x", NOWHERE),
            1,
            "no router answers on 127.0.0.1:1 (Connection refused): `isthmus",
        ),
        (("index", NOWHERE), 1, "no router answers on 127.0.0.1:1 ("),
        (("make-model", "/proc/no/such/place"), 78, "cannot write to /proc/no/such/place"),
        (("up", "--model=/no/such/model"), 78, "--model: there is no directory /no/such/model"),
        (("up", "--model=x", "--port=70000"), 2, "--port"),
        (("up", "x", "--port=70000"), 2, "--port"),
        (("up",), 2, "MODEL is missing"),
        (("up", "/no/such/model"), 78, "--model: there is no directory /no/such/model"),
        (("generate", "x", "--prompt=y"), 2, "--prompt is given, and 'x' beside it: which?"),
        (("generate", "x", "y"), 2, "what is 'y'? A text of several words stands in quotes"),
        (("generate", "--chat", "x", "--promt=y"), 2, "there is no flag --promt; did you mean --prompt?"),
        (("generate", "--max_token", "7"), 2, "there is no flag --max_token; did you mean --max-tokens?"),
        (("explain", "--zzz"), 2, "there is no flag --zzz ("),
    ],
)
def test_what_cannot_work_is_one_sentence(isthmus_command, arguments, code, sentence):
    ended, _, said = isthmus_command(*arguments)
    assert ended == code, said
    assert said.startswith(f"isthmus {arguments[0]}: {sentence}")
    assert said.count("\n") == 1


def test_a_prompt_on_standard_input_must_be_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(InvalidRequest, match="UTF-8"):
        client.given_prompt("")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("für".encode()), encoding="utf-8"))
    assert client.given_prompt("") == "für"


@pytest.mark.parametrize(
    "outcome,code",
    [(0, 0), (1, 1), (ConfigError("no"), 78), (Unavailable("no"), 1), (KeyboardInterrupt(), 130)],
)
def test_outcomes_are_exit_codes(isthmus_command, monkeypatch, outcome, code):
    def run(name, arguments):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(isthmus, "_run", run)
    said = "isthmus size: no\n" if isinstance(outcome, Exception) else ""
    assert isthmus_command("size") == (code, "", said)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_the_commands_are_listed_by_groups(isthmus_command, arguments):
    code, shown, said = isthmus_command(*arguments)
    assert (code, said) == (0, "")
    sections = {part.splitlines()[0]: part for part in shown.split("\n\n")[2:]}
    assert len(sections) > 3
    for name, command in commands.COMMANDS.items():
        assert f"\n  {name} " in sections[command.group]
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    "name,sentence",
    [
        ("gnerate", "there is no command 'gnerate'; did you mean generate? (isthmus help lists them)"),
        ("zzz", "there is no command 'zzz' (isthmus help lists them)"),
    ],
)
def test_a_command_that_does_not_exist_has_its_nearest_named(isthmus_command, name, sentence):
    assert isthmus_command(name, "x") == (2, "", f"isthmus: {sentence}\n")


@pytest.mark.parametrize("arguments", [("help", "explain"), ("explain", "--help")])
def test_help_of_a_command(isthmus_command, arguments):
    code, shown, _ = isthmus_command(*arguments)
    assert code == 0 and shown.startswith("usage: isthmus explain") and "standard input\n" in shown


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_reader_that_has_gone_is_no_bug(argument):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "services.cli", argument]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_the_version_is_the_one_that_is_installed(isthmus_command):
    assert isthmus_command("--version") == (0, f"isthmus {metadata.version('isthmus')}\n", "")


def plan_of(*flags):
    shape = load(up.UpConfig, ["--model=m", *flags]).shape()
    cluster = LocalCluster(shape, print, router_ports=(7777,), http_ports=(8000,), etcd_endpoints=("e:1",))
    return {name: flags for name, _, flags in cluster._plan()}


def test_a_flag_that_is_passed_on_may_hold_commas():
    plan = plan_of(
        "--router-flag=plans=remote,local", "--rank-flag=engine-arg=--x=1,2", "--flag=etcd-user=a,b"
    )
    assert plan["router"][-1] == "--plans=remote,local"
    assert plan["decode"][-1] == "--engine-arg=--x=1,2"
    assert "--etcd-user=a,b" in plan["prefill"]


def test_ranks_that_listen_everywhere_are_called_on_this_machine():
    flag = "--advertise-host=127.0.0.1"
    plan = plan_of("--host=0.0.0.0")
    assert flag in plan["decode"] and flag in plan["prefill"] and flag not in plan["router"]
    assert flag not in plan_of()["decode"]
    assert plan_of("--host=0.0.0.0", "--rank-flag=advertise-host=10.0.0.1")["decode"][-1].endswith("10.0.0.1")
