"""Whatever a process and its libraries write comes out as JSON objects, one a line."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.observe.json_lines import FLAG, json_line

pytestmark = pytest.mark.long

GRPC = "I1122 06:38:49.020359   10716 chttp2_transport.cc:1403] ipv4:127.0.0.1:44529: Got goaway [2]"


@given(st.text())
def test_any_line_becomes_one_object_of_one_line(text):
    line = json_line(text, "s", 0.0)
    assert "\n" not in line or text.startswith("{")  # the reader has split lines before
    assert isinstance(json.loads(line), dict)


def test_one_line(subtests):
    with subtests.test("an object is left as it is"):
        line = json.dumps({"level": "info", "ts": 1.5, "msg": "etcd's"})
        assert json_line(line, "s", 0.0) is line
    for line in ['{"a": NaN}', "{", "{}{}", "[1]", '"text"', "{" * 5000, "17", "{'a': 1}"]:
        with subtests.test("what only looks like an object is text", line=line):
            assert json.loads(json_line(line, "s", 0.0))["message"] == line
    with subtests.test("a line of grpc s core says how bad it is and where"):
        assert json.loads(json_line(GRPC, "router-0", 0.25)) == {
            "time": "1970-01-01T00:00:00.250Z",
            "level": "INFO",
            "service": "router-0",
            "logger": "chttp2_transport.cc:1403",
            "message": "ipv4:127.0.0.1:44529: Got goaway [2]",
        }
        levels = {letter: json.loads(json_line(letter + GRPC[1:], "s", 0.0))["level"] for letter in "WEF"}
        assert levels == {"W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


def logged(body, **popen):
    """Exit code, stdout and the objects on stderr, of a process that logs as a service does."""
    code = textwrap.dedent(
        """
        import logging, os, signal, subprocess, sys, threading, warnings
        from services.observe import json_lines, log_lines
        log_lines.log_service("me", "info", "json")
        log = logging.getLogger("services.somewhere")
        """
    ) + textwrap.dedent(body)
    environment = {name: value for name, value in os.environ.items() if name != "ISTHMUS_JSON_LINES"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **popen,
    )
    out, err = process.communicate(timeout=60)
    return process.returncode, out, [json.loads(line) for line in err.splitlines()]


def test_lines_of_a_process(subtests):
    with subtests.test("our lines those of libraries and of children are objects in their order"):
        code, out, said = logged(
            """
        log_lines.event(log, "began", tokens=3, seconds=0.25, why="two words", rank=None, far=float("inf"))
        os.write(2, b"W1122 06:38:49.020359 7 tcp.cc:1] lost\\n")   # as C++ does
        subprocess.run([sys.executable, "-c", "print('of a child')"])
        print("printed", flush=True)
        warnings.warn("old")
        os.write(2, b"no end of line")
        """
        )
        assert (code, out) == (0, "")
        assert all(line["service"] == "me" and line["time"].endswith("Z") for line in said)
        began, lost, child, printed, warned, *_, last = said
        assert {
            name: began[name] for name in ("event", "tokens", "seconds", "why", "rank", "far", "logger")
        } == {
            "event": "began",
            "tokens": 3,
            "seconds": 0.25,
            "why": "two words",
            "rank": None,
            "far": "inf",
            "logger": "services.somewhere",
        }
        assert (lost["level"], lost["logger"], lost["message"]) == ("WARNING", "tcp.cc:1", "lost")
        assert (child["message"], printed["message"]) == ("of a child", "printed")
        assert warned["logger"] == "py.warnings" and "old" in warned["message"]
        assert last["message"] == "no end of line"
    with subtests.test("a traceback is one object"):
        code, _, (said,) = logged("raise KeyError('lost')")
        assert code == 1
        assert said["level"] == "CRITICAL" and said["exception"].endswith("KeyError: 'lost'")
    with subtests.test("the last words of a process that crashes come through"):
        code, _, said = logged('os.write(2, b"F1122 06:38:49.1 7 a.cc:1] check failed\\n"); os.abort()')
        assert code == -signal.SIGABRT
        assert said[0]["level"] == "CRITICAL" and said[0]["message"] == "check failed"
    with subtests.test("a signal to the whole process group takes no line"):
        code, _, said = logged(
            """
        signal.signal(signal.SIGINT, lambda *_: log.info("heard"))
        os.killpg(0, signal.SIGINT)
        log.info("after")
        """,
            start_new_session=True,
        )
        assert (code, [line["message"] for line in said]) == (0, ["heard", "after"])
    with subtests.test("without its reader a process writes where it did before"):
        code, _, said = logged(
            """
        (reader,) = [t for t in threading.enumerate() if t.name == "json-lines"]
        (child,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        os.kill(int(child), signal.SIGKILL)
        reader.join()
        log.info("still here")
        """
        )
        assert (code, [line["message"] for line in said]) == (0, ["still here"])


@pytest.mark.long
def test_a_refusal_is_an_object_too(subtests):
    for module, flags, code, message in [
        ("services.router", ["--no-such-flag=1"], 2, "no-such-flag"),
        ("services.decode", ["--etcd-key=/nowhere"], 78, "isthmus-"),
    ]:
        with subtests.test(module=module, flags=flags, code=code, message=message):
            worker = ["--model=/nowhere"] + (
                ["--worker=w", "--rank-index=0"] if module == "services.decode" else []
            )
            run = subprocess.run(
                [sys.executable, "-m", module, FLAG, *worker, *flags],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (run.returncode, run.stdout) == (code, "")
            said = [json.loads(line) for line in run.stderr.splitlines()]
            assert message in said[-1]["message"]
