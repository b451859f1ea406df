"""A person at a terminal reads log lines like this, in colours: `02:24:01 INFO  rank_ready rank=decode/1`."""

import os
import re
from dataclasses import dataclass
from typing import TextIO

_LEVELS = {"WARNING": "WARN", "CRITICAL": "CRIT"}
_COLORS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}
_DIM, _BOLD = "2", "1"
_EVENT = re.compile(r"[a-z0-9_]+")
# log_lines writes them so elsewhere.
_LONG = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d{3}Z ([A-Z]+) (\S+) \S+ (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    clock: str  # It is UTC, as HH:MM:SS.
    level: str
    service: str
    message: str  # It is an event and its fields.

    @property
    def event(self) -> str:
        return self.message.partition(" ")[0]

    @property
    def fields(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.message.split()[1:] if "=" in word)

    def short(self, color: bool) -> str:
        event, blank, rest = self.message.partition(" ")
        level = _LEVELS.get(self.level, self.level).ljust(5)
        who = f"{self.service.ljust(9)} " if self.service else ""
        if not color:
            return f"{self.clock} {level} {who}{self.message}"
        level = _colored(level, _COLORS.get(self.level, ""))
        head = f"{_colored(self.clock, _DIM)} {level} {_colored(who, _DIM)}"
        # It is a sentence of some library's.
        if _EVENT.fullmatch(event) is None or (rest and "=" not in rest):
            return f"{head}{self.message}"
        return f"{head}{_colored(event, _BOLD)}{blank}{_colored(rest, _DIM)}"


def read_line(line: str) -> LogLine | None:
    """Return the line, or None for one that our logging did not write."""
    found = _LONG.fullmatch(line)
    return None if found is None else LogLine(*found.groups())


def is_colored(stream: TextIO) -> bool:
    """Say whether the stream is a terminal that may be coloured, as https://no-color.org asks."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colored(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and code else text
