"""All log lines become JSON objects, one a line, with `--log-format=json`, whoever writes them.

    our own logging --JSON--+
    gRPC's C++ core, NIXL --+--> descriptors 1 and 2 --> pipe --> this file, a process of its own --> stderr
    child processes --------+

A line that is no JSON object becomes the `message` of one. The process outlives us, so that our last lines
arrive even after a crash. It ends when nobody has the pipe open any more. This file is run by its path,
without our packages, so that it starts within milliseconds.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

FLAG = "--log-format=json"
_PIPED = "ISTHMUS_JSON_LINES"  # The environment has this if the process that started us has laid a pipe.
_DRAIN_S = 2.0  # We wait no longer, since a child of ours may hold the pipe open.
_CHUNK_BYTES = 1 << 16
_LONGEST_BYTES = 1 << 20  # A longer line is split into pieces.
_STDOUT, _STDERR = 1, 2
# absl/log writes severity, date and time, thread, file and line.
_ABSL = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ([\w.+-]+:\d+)\] (.*)", re.DOTALL)
_SEVERITIES = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


def timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


def json_line(line: str, service: str, now: float, level: str = "INFO") -> str:
    if _is_object(line):
        return line
    logger = "output"
    if (found := _ABSL.fullmatch(line)) is not None:
        level, logger, line = _SEVERITIES[found[1]], found[2], found[3]
    entry = {"time": timestamp(now), "level": level, "service": service, "logger": logger, "message": line}
    return json.dumps(entry)


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is Python's JSON, and nobody else's")


def lay_pipe(service: str, descriptors: Sequence[int] = (_STDOUT, _STDERR)) -> None:
    """Redirect what we and our children write to `descriptors` through a process that writes it to stderr as
    JSON.

    This does nothing if the process that started us has done so. If the other process is killed, later output
    goes where it went before.
    """
    if os.environ.get(_PIPED):
        return
    reading, writing = os.pipe()
    before = [(number, os.dup(number)) for number in descriptors]
    # The process has a session of its own, so that neither Ctrl-C nor a supervisor that kills a process group
    # ends it before our last lines.
    reader = subprocess.Popen(
        [sys.executable, "-P", "-S", "-E", __file__, service],
        stdin=reading,
        stdout=_STDERR,
        start_new_session=True,
    )
    os.close(reading)
    for number in descriptors:
        os.dup2(writing, number)
    os.close(writing)
    os.environ[_PIPED] = str(os.getpid())

    def restore() -> None:
        for number, saved in before:
            os.dup2(saved, number)

    def drain() -> None:
        """Wait for the last lines: a container's processes are killed once its first one has ended."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # The stream may be closed, or have no reader.
                stream.flush()
        restore()
        with suppress(subprocess.TimeoutExpired):
            reader.wait(_DRAIN_S)

    def watch() -> None:
        reader.wait()
        restore()

    atexit.register(drain)
    threading.Thread(target=watch, name="json-lines", daemon=True).start()


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    pending = b""
    while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines
        if len(pending) >= _LONGEST_BYTES:
            yield pending
            pending = b""
    yield pending


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    (service,) = sys.argv[1:]
    for line in _lines(sys.stdin.buffer):
        text = line.decode(errors="replace").rstrip()
        if text:
            _write(json_line(text, service, time.time()) + "\n")


def _write(line: str) -> None:
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except BrokenPipeError:  # Nobody would read a report of this error, either.
        os._exit(0)


if __name__ == "__main__":
    main()
