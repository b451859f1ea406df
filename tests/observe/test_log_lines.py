"""Log lines as they appear."""

import asyncio
import json
import logging
import math
import re
from pathlib import Path

import pytest

from services.observe import log_lines

pytestmark = pytest.mark.long

logger = logging.getLogger("services.somewhere")


@pytest.fixture(autouse=True)
def root_logger():
    """What a test sets up on the root logger ends with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


async def test_each_task_logs_its_own_request_id(capsys):
    log_lines.setup_logging("s", color=False)
    both = asyncio.Barrier(2)

    async def serve(request_id):
        with log_lines.request_context(request_id):
            await both.wait()
            logger.info("served %s", request_id)

    await asyncio.gather(serve("a"), serve("b c"))
    logger.info("after")
    lines = capsys.readouterr().err.splitlines()
    assert {line.split("somewhere ")[1] for line in lines} == {
        "served a request_id=a",
        'served b c request_id="b c"',
        "after",
    }


def test_lines_as_json(subtests, capsys):
    with subtests.test("as json a line has an event s fields by their names"):
        log_lines.setup_logging("decode-0/1", "info", "json")
        with log_lines.request_context("r"):
            log_lines.event(
                logger, "said", tokens=3, share=1 / 3, worst=math.nan, who=Path("/a"), service="x"
            )
            logger.info("plain %s", "words")
        event, plain = map(json.loads, capsys.readouterr().err.splitlines())
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event.pop("time"))
        assert event == {
            "level": "INFO",
            "service": "decode-0/1",
            "logger": "services.somewhere",
            "event": "said",
            "tokens": 3,
            "share": 0.333333,
            "worst": "nan",
            "who": "/a",
            "service_": "x",  # the line's own stays
            "request_id": "r",
        }
        assert (plain["message"], plain["request_id"]) == ("plain words", "r")
    with subtests.test("as json a traceback stays in its line"):
        log_lines.setup_logging("s", "info", "json")
        try:
            raise KeyError("lost")
        except KeyError:
            logger.exception("failed")
        said = json.loads(capsys.readouterr().err)
        assert said["message"] == "failed" and said["exception"].endswith("KeyError: 'lost'")


def test_lines(subtests, capsys):
    with subtests.test("a line tells when who and what"):
        log_lines.setup_logging("decode-0/1", "info", color=False)
        log_lines.event(logger, "request_finished", cached_len=128, ttft_ms=12.3456789, reason="stop")
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO decode-0/1 services\.somewhere "
            r"request_finished cached_len=128 ttft_ms=12\.3457 reason=stop\n",
            capsys.readouterr().err,
        )
    for value, text in [
        ("plain", "value=plain\n"),
        ("two words", 'value="two words"\n'),
        ("a=b", 'value="a=b"\n'),
        ("", 'value=""\n'),
        ("line\nline", 'value="line\\nline"\n'),
        ("\x1b[31m", 'value="\\u001b[31m"\n'),
        (None, "value=None\n"),
        (True, "value=True\n"),
    ]:
        with subtests.test(
            "a value can neither break the line nor pass for another key", value=value, text=text
        ):
            log_lines.setup_logging("s", color=False)
            log_lines.event(logger, "said", value=value)
            assert capsys.readouterr().err.endswith("said " + text)
    with subtests.test("the level holds back"):
        log_lines.setup_logging("s", "WARNING", color=False)
        log_lines.event(logger, "quiet")
        log_lines.event(logger, "loud", level=logging.WARNING)
        assert "quiet" not in (err := capsys.readouterr().err)
        assert "loud" in err
    with subtests.test("setting up twice does not log twice"):
        log_lines.setup_logging("s", color=False)
        log_lines.setup_logging("s", color=False)
        logger.info("once")
        assert capsys.readouterr().err.count("once") == 1
    with subtests.test("a traceback follows its line"):
        log_lines.setup_logging("s", color=False)
        try:
            raise KeyError("lost")
        except KeyError:
            with log_lines.request_context("r"):
                logger.exception("failed")
        err = capsys.readouterr().err
        assert "failed request_id=r\nTraceback" in err
        assert "KeyError: 'lost'" in err


def test_colors_and_terminals(subtests, capsys, monkeypatch):
    with subtests.test("colors only when told"):
        log_lines.setup_logging("s", color=True)
        logger.warning("careful")
        assert "\x1b[33m" in capsys.readouterr().err
        log_lines.setup_logging("s")  # stderr is no terminal here
        logger.warning("careful")
        assert "\x1b" not in capsys.readouterr().err
    with subtests.test("at a terminal lines are short"), monkeypatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setattr(log_lines.sys.stderr, "isatty", lambda: True)
        log_lines.setup_logging("s")
        log_lines.event(logger, "disk_full", logging.WARNING, left=3)
        assert re.fullmatch(r"\d\d:\d\d:\d\d WARN  disk_full left=3\n", capsys.readouterr().err)
