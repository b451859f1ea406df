"""These tests show what the command `isthmus` answers where it cannot do what it is asked: a sentence and an
exit code."""

import io
import os
import subprocess
import sys
from importlib import metadata

import pytest

from services.cli import __main__ as isthmus
from services.cli import commands, router_client
from services.cli.local import up
from services.cli.local.local_cluster import LocalCluster
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


def test_outcomes_are_exit_codes(subtests, isthmus_command, monkeypatch):
    for outcome, code in [
        (0, 0),
        (1, 1),
        (ConfigError("no"), 78),
        (Unavailable("no"), 1),
        (KeyboardInterrupt(), 130),
    ]:
        with subtests.test(outcome=outcome, code=code), monkeypatch.context() as patch:

            def run(name, arguments, outcome=outcome):
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome

            patch.setattr(isthmus, "_run", run)
            said = "isthmus size: no\n" if isinstance(outcome, Exception) else ""
            assert isthmus_command("size") == (code, "", said)


def test_what_cannot_work_is_one_sentence(subtests, isthmus_command, monkeypatch):
    for arguments, code, sentence in [
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
    ]:
        with subtests.test(
            "what cannot work is one sentence", arguments=arguments, code=code, sentence=sentence
        ):
            ended, _, said = isthmus_command(*arguments)
            assert ended == code, said
            assert said.startswith(f"isthmus {arguments[0]}: {sentence}")
            assert said.count("\n") == 1
    for name, sentence in [
        ("gnerate", "there is no command 'gnerate'; did you mean generate? (isthmus help lists them)"),
        ("zzz", "there is no command 'zzz' (isthmus help lists them)"),
    ]:
        with subtests.test(
            "a command that does not exist has its nearest named", name=name, sentence=sentence
        ):
            assert isthmus_command(name, "x") == (2, "", f"isthmus: {sentence}\n")
    with subtests.test("a prompt on standard input must be text"), monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
        with pytest.raises(InvalidRequest, match="UTF-8"):
            router_client.given_prompt("")
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("für".encode()), encoding="utf-8"))
        assert router_client.given_prompt("") == "für"


def test_a_reader_that_has_gone_is_no_bug(subtests):
    for argument in ["--help", "--version"]:
        with subtests.test(argument=argument):
            reading, writing = os.pipe()
            os.close(reading)
            command = [sys.executable, "-m", "services.cli", argument]
            ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
            os.close(writing)
            assert (ended.returncode, ended.stderr) == (141, b"")


def test_help(subtests, isthmus_command):
    for arguments in [(), ("--help",), ("help",)]:
        with subtests.test("the commands are listed by groups", arguments=arguments):
            code, shown, said = isthmus_command(*arguments)
            assert (code, said) == (0, "")
            sections = {part.splitlines()[0]: part for part in shown.split("\n\n")[2:]}
            assert len(sections) > 3
            for name, command in commands.COMMANDS.items():
                assert f"\n  {name} " in sections[command.group]
            assert max(map(len, shown.splitlines())) <= 80
    for arguments in [("help", "explain"), ("explain", "--help")]:
        with subtests.test("help of a command", arguments=arguments):
            code, shown, _ = isthmus_command(*arguments)
            assert code == 0 and shown.startswith("usage: isthmus explain") and "standard input\n" in shown
    with subtests.test("the version is the one that is installed"):
        assert isthmus_command("--version") == (0, f"isthmus {metadata.version('isthmus')}\n", "")


def plan_of(*flags):
    shape = load(up.UpConfig, ["--model=m", *flags]).shape()
    cluster = LocalCluster(shape, print, router_ports=(7777,), http_ports=(8000,), etcd_endpoints=("e:1",))
    return {name: flags for name, _, flags in cluster._plan()}


def test_flags_that_are_passed_on(subtests):
    with subtests.test("a flag that is passed on may hold commas"):
        plan = plan_of(
            "--router-flag=plans=remote,local", "--rank-flag=engine-arg=--x=1,2", "--flag=etcd-user=a,b"
        )
        assert plan["router"][-1] == "--plans=remote,local"
        assert plan["decode"][-1] == "--engine-arg=--x=1,2"
        assert "--etcd-user=a,b" in plan["prefill"]
    with subtests.test("ranks that listen everywhere are called on this machine"):
        flag = "--advertise-host=127.0.0.1"
        plan = plan_of("--host=0.0.0.0")
        assert flag in plan["decode"] and flag in plan["prefill"] and flag not in plan["router"]
        assert flag not in plan_of()["decode"]
        assert plan_of("--host=0.0.0.0", "--rank-flag=advertise-host=10.0.0.1")["decode"][-1].endswith(
            "10.0.0.1"
        )
