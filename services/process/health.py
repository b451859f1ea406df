"""A process reports whether it has started, accepts requests and lives, and answers probes.

    starting --> waiting --> serving --> stopping     a child's phases, as notify.py reports them
                 |---------------------|
                    no report for a minute: it hangs, and its parent kills it
                    none for another half minute: even that did not help

A parent restarts a child that ended; the new one may hang as well, or end each time. If it does not wait or
serve again within --restart-timeout-s, it counts as dead: the kubelet, which calls /startup only until it
passes once in a container, must restart the whole container.

A process waits when only etcd is missing, however long that takes.

On --health-port it answers a kubelet's probes:

    GET /startup   200 once it has waited or served: before that a model may be loading for minutes
    GET /ready     200 while it accepts requests
    GET /live      200 unless only a restart would help

Otherwise the answer is 503 with the reason. It is always plain HTTP: a kubelet has neither our authority nor
a certificate.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.host.ports import host_port, listen
from services.values.errors import ConfigError

SILENT_S = 60.0  # A loop that has not run for this long will not run again.
DEAF_S = 90.0  # By then its parent should have killed it.
_PROBE_TIMEOUT_S = 5.0


class ProcessPhase(Enum):
    STARTING = "starting"
    WAITING = "waiting for etcd"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Health:
    startup: str = ""
    ready: str = ""
    live: str = ""


@dataclass(slots=True)
class Lifecycle:
    name: str
    clock: Callable[[], float] = time.monotonic
    restart_timeout_s: float = math.inf  # Once it has waited or served, it must do so again within this time.
    phase: ProcessPhase = ProcessPhase.STARTING
    has_started: bool = False  # This is about any incarnation, also an earlier one.
    has_served: bool = False  # This is about any incarnation, too.
    last_words: str = ""  # This is its own reason why this incarnation ends, or the last one ended.
    last_end: str = ""  # This is how its last incarnation ended, until it waits or serves again.
    # None means that the process is our own, or that this incarnation has not reported yet.
    last_beat: float | None = None
    # If it has started but neither waits nor serves now, this is when any incarnation last did.
    _stood: float = 0.0

    def enter(self, phase: ProcessPhase) -> None:
        if self.beats:
            self._stood = self.clock()
        self.phase = phase
        self.has_started = self.has_started or self.beats
        self.has_served = self.has_served or phase is ProcessPhase.SERVING
        if self.beats:
            self.last_end = ""

    def begin(self) -> None:
        self.enter(ProcessPhase.STARTING)
        self.last_beat = None

    @property
    def beats(self) -> bool:
        return self.phase in (ProcessPhase.WAITING, ProcessPhase.SERVING)

    def health(self) -> Health:
        state = f"{self.name} is {self.phase.value}"
        if self.last_end:
            state += f"; its last life ended with {self.last_end}"
        return Health(
            startup="" if self.has_started else state,
            ready="" if self.phase is ProcessPhase.SERVING else state,
            live=self._beyond_help(),
        )

    def _beyond_help(self) -> str:
        if self.beats:
            silent_s = 0.0 if self.last_beat is None else self.clock() - self.last_beat
            return "" if silent_s < DEAF_S else f"{self.name} has been silent for {silent_s:.0f} s"
        away_s = self.clock() - self._stood if self.has_started else 0.0
        if away_s < self.restart_timeout_s:
            return ""
        why = f": its last life ended with {self.last_end}" if self.last_end else ""
        return f"{self.name} has been away for {away_s:.0f} s{why}"


@dataclass(slots=True)
class SilentLooks:
    """This counts for how many looks a process has not reported.

    It does not count seconds: the process that looks may have been stopped itself, and received nothing then.
    """

    looks: int = 0
    _last_seen: float | None = None

    def look(self, lifecycle: Lifecycle) -> None:
        beat = lifecycle.last_beat if lifecycle.beats else None
        self.looks = self.looks + 1 if beat is not None and beat == self._last_seen else 0
        self._last_seen = beat


def joint_health(parts: Sequence[Health]) -> Health:
    def reasons(name: str) -> str:
        return "; ".join(filter(None, (getattr(part, name) for part in parts)))

    return Health(reasons("startup"), reasons("ready"), reasons("live"))


@contextlib.asynccontextmanager
async def answering(host: str, port: int | None, check: Callable[[], Health]) -> AsyncIterator[int | None]:
    """Answer probes with the result of `check`; yield the port. Port 0 chooses a free one, None answers no
    probes.

    Raises:
        ConfigError: The address cannot be bound.
    """
    if port is None:
        yield None
        return
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(f"cannot answer probes on {host_port(host, port)}: {error}") from error

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                request_line = await reader.readline()
                while (await reader.readline()).strip():
                    pass
                writer.write(_answer(request_line.decode("latin-1"), check()))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, sock=listener)
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


def _answer(request_line: str, health: Health) -> bytes:
    reasons = {"/startup": health.startup, "/ready": health.ready, "/live": health.live}
    method, path, *_ = [*request_line.split(), "", ""]
    path = path.partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, text = "405 Method Not Allowed", "only GET"
    elif path not in reasons:
        status, text = "404 Not Found", "there are /startup, /ready and /live"
    elif reasons[path]:
        status, text = "503 Service Unavailable", reasons[path]
    else:
        status, text = "200 OK", "ok"
    body = (text + "\n").encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + (b"" if method == "HEAD" else body)
