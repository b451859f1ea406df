"""Log lines are `time level service logger event key=value ...`, or an object of these with
--log-format=json.

At a terminal they are `time level event key=value ...`, in colours. Inside `request_context(id)` every line
of the same task also carries `request_id=...`.
"""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType

from services.observe import json_lines
from services.observe.short_lines import LogLine, is_colored

_request_id: ContextVar[str] = ContextVar("request_id", default="")


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Let log lines of this task, and of tasks started in it, carry the id."""
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


class _RequestIdFilter(logging.Filter):
    """This filter runs in the task that logs, so that it sees the task's request id."""

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
    """This formatter is for whoever sits at the terminal, and knows what it started there."""

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
    """This formatter writes one object a line; an event's fields are its own, by their names."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": json_lines.timestamp(record.created),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
        }
        if (name := getattr(record, "event", None)) is not None:
            said["event"] = name
            fields: Mapping[str, object] = getattr(record, "fields", {})
            said |= {f"{key}_" if key in said else key: _plain(value) for key, value in fields.items()}
        else:
            said["message"] = record.getMessage()
        if request_id := getattr(record, "request_id", ""):
            said.setdefault("request_id", request_id)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = record.stack_info
        return json.dumps(said)


def _plain(value: object) -> str | int | float | bool | None:
    """Return the value as JSON has it, which knows neither infinity nor our types."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or type(value) in (str, int, bool) else str(value)  # type: ignore[return-value]


def setup_logging(
    service: str, level: str = "INFO", log_format: str = "text", color: bool | None = None
) -> None:
    """Send every log line to stderr; this replaces what was set up before.

    `service` names the process in each line ("decode-0/1"); `log_format` is text or json. On a terminal lines
    are short, and coloured unless NO_COLOR is set; `color` says so whatever it is, or that it is none.
    json_lines.lay_pipe makes JSON of what others write there.
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
    """Set logging up for the whole of a service's process, its libraries and its children."""
    setup_logging(service, level, log_format)
    if log_format == "json":
        json_lines.lay_pipe(service)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log a traceback as one object, too."""
    logging.getLogger("uncaught").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
