"""Log lines are `time level service logger event key=value ...`, or JSON objects with --log-format=json.

On a terminal they are `time level event key=value ...`, in colours, as in `02:24:01 INFO  rank_ready
rank=decode/1`. Inside `request_context(id)` every line of the same task also has `request_id=...`.
"""

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from services.observe import json_lines

_LEVELS = {"WARNING": "WARN", "CRITICAL": "CRIT"}
_COLORS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}
_DIM, _BOLD = "2", "1"
_EVENT = re.compile(r"[a-z0-9_]+")
# This is the format of lines that do not go to a terminal.
_LONG = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d{3}Z ([A-Z]+) (\S+) \S+ (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    clock: str  # This is UTC as HH:MM:SS.
    level: str
    service: str
    message: str  # This is an event with its fields.

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
        # The message is a sentence of some library.
        if _EVENT.fullmatch(event) is None or (rest and "=" not in rest):
            return f"{head}{self.message}"
        return f"{head}{_colored(event, _BOLD)}{blank}{_colored(rest, _DIM)}"


def read_line(line: str) -> LogLine | None:
    found = _LONG.fullmatch(line)
    return None if found is None else LogLine(*found.groups())


def is_colored(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that may be coloured, as https://no-color.org requests."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colored(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and code else text


_request_id: ContextVar[str] = ContextVar("request_id", default="")


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Add the request id to log lines of this task, and of tasks started in it."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def event(logger: logging.Logger, name: str, level: int = logging.INFO, **fields: object) -> None:
    """Log `name key=value ...`; a value with spaces, quotes or control characters is quoted as JSON."""
    if logger.isEnabledFor(level):
        text = " ".join([name, *(f"{key}={_text(value)}" for key, value in fields.items())])
        logger.log(level, "%s", text, extra={"event": name, "fields": fields})


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if text and is_plain else json.dumps(text)


# A filter runs in the task that logs, and so it sees the task's request id.
class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


class _LineFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {service.replace('%', '%%')} %(name)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) + _of_request(record)


class _ShortFormatter(logging.Formatter):
    def __init__(self, color: bool) -> None:
        super().__init__()
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.gmtime(record.created))
        line = LogLine(clock, record.levelname, "", record.message + _of_request(record))
        return line.short(self._color)


def _of_request(record: logging.LogRecord) -> str:
    request_id = getattr(record, "request_id", "")
    return f" request_id={_text(request_id)}" if request_id else ""


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": json_lines.timestamp(record.created),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
        }
        if (name := getattr(record, "event", None)) is not None:
            entry["event"] = name
            fields: Mapping[str, object] = getattr(record, "fields", {})
            entry |= {f"{key}_" if key in entry else key: _plain(value) for key, value in fields.items()}
        else:
            entry["message"] = record.getMessage()
        if request_id := getattr(record, "request_id", ""):
            entry.setdefault("request_id", request_id)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)


def _plain(value: object) -> str | int | float | bool | None:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or type(value) in (str, int, bool) else str(value)  # type: ignore[return-value]


def setup_logging(
    service: str, level: str = "INFO", log_format: str = "text", color: bool | None = None
) -> None:
    """Send every log line to stderr, instead of what was set up before.

    `service` names the process in each line ("decode-0/1"); `log_format` is text or json. On a terminal lines
    are short, and coloured unless NO_COLOR is set; `color` overrides both checks. Output of other code
    becomes JSON by json_lines.lay_pipe.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestIdFilter())
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _text_formatter(service, color))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(log_format == "json")


def _text_formatter(service: str, color: bool | None) -> logging.Formatter:
    is_short = sys.stderr.isatty() if color is None else color
    return _ShortFormatter(is_colored(sys.stderr) or bool(color)) if is_short else _LineFormatter(service)


def log_service(service: str, level: str, log_format: str) -> None:
    setup_logging(service, level, log_format)
    if log_format == "json":
        json_lines.lay_pipe(service)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("uncaught").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
