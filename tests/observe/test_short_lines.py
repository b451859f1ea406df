"""These tests show what a person at a terminal reads of a log line."""

import io

import pytest

from services.observe.log_lines import LogLine, is_colored, read_line

pytestmark = pytest.mark.long

LINE = (
    "2026-11-22T02:23:59.112Z INFO decode/0 services.rank.main rank_ready rank=decode/0 "
    'endpoint=127.0.0.1:20427 note="a b"'
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_short_lines(subtests, monkeypatch):
    with subtests.test("a line is read and shortened"):
        line = read_line(LINE)
        assert (line.clock, line.level, line.service, line.event) == (
            "02:23:59",
            "INFO",
            "decode/0",
            "rank_ready",
        )
        assert line.fields["endpoint"] == "127.0.0.1:20427"
        rest = 'rank=decode/0 endpoint=127.0.0.1:20427 note="a b"'
        assert line.short(color=False) == f"02:23:59 INFO  decode/0  rank_ready {rest}"
        assert line.short(color=True) == (
            "\x1b[2m02:23:59\x1b[0m INFO  \x1b[2mdecode/0  \x1b[0m"
            f"\x1b[1mrank_ready\x1b[0m \x1b[2m{rest}\x1b[0m"
        )
    for level, seen in [("WARNING", "\x1b[33mWARN \x1b[0m"), ("ERROR", "\x1b[31mERROR\x1b[0m")]:
        with subtests.test("what is wrong stands out", level=level, seen=seen):
            assert seen in LogLine("02:23:59", level, "", "disk_full").short(color=True)
    for line in ["", "Traceback (most recent call last):", '{"level": "INFO"}', "I0000 x"]:
        with subtests.test("lines of others are not read", line=line):
            assert read_line(line) is None
    with subtests.test("no color is heeded"), monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.delenv("NO_COLOR", raising=False)
        assert is_colored(Terminal()) and not is_colored(io.StringIO())
        patch.setenv("NO_COLOR", "1")
        assert not is_colored(Terminal())
