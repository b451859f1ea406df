"""A child process reports its state to its parent by sd_notify(3), which systemd understands too.

    X_WAITING=1 --> READY=1 --> STOPPING=1        and WATCHDOG=1 every few seconds
    STATUS=why it cannot start, or go on

X_WAITING is our own and means that only etcd is missing; other receivers ignore it. These are datagrams to
the socket that NOTIFY_SOCKET names, which need no port and no thread.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.process.health import Lifecycle, ProcessPhase

log = logging.getLogger(__name__)

NOTIFY_SOCKET = "NOTIFY_SOCKET"
_BEAT_S = 5.0
_MAX_MESSAGE_BYTES = 4096
_WAITING, _READY, _STOPPING = "X_WAITING=1", "READY=1", "STOPPING=1"
_STATUS = "STATUS="
_MAX_STATUS_CHARS = 1000
_PHASES = {_WAITING: ProcessPhase.WAITING, _READY: ProcessPhase.SERVING, _STOPPING: ProcessPhase.STOPPING}


@contextlib.contextmanager
def listening(child: Lifecycle) -> Iterator[dict[str, str]]:
    """Follow one incarnation of a child process on the running loop; yield the environment that it needs.

    Each incarnation has a socket of its own, so that late messages of an earlier one are not received.
    """
    loop = asyncio.get_running_loop()
    child.begin()
    child.last_words = ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver:
        receiver.bind("")  # The kernel chooses an abstract name (unix(7), autobind).
        loop.add_reader(receiver, _receive, receiver, child)
        try:
            yield {NOTIFY_SOCKET: "@" + receiver.getsockname()[1:].decode()}
        finally:
            loop.remove_reader(receiver)
            while _receive(receiver, child):  # These are its last messages, sent before we saw its end.
                pass
            child.begin()


def _receive(receiver: socket.socket, child: Lifecycle) -> bool:
    try:
        message = receiver.recv(_MAX_MESSAGE_BYTES).decode(errors="replace")
    except BlockingIOError:
        return False
    for line in message.splitlines():
        if (phase := _PHASES.get(line)) is not None:
            child.enter(phase)
        if line.startswith(_STATUS):
            child.last_words = line.removeprefix(_STATUS)
        child.last_beat = child.clock()
    return True


@dataclass(slots=True)
class Notifier:
    """This sends to the process that started us. Without NOTIFY_SOCKET it sends nothing."""

    # The variable is removed, so that our children do not get it.
    address: str = field(default_factory=lambda: os.environ.pop(NOTIFY_SOCKET, ""))

    def send(self, message: str) -> None:
        if not self.address:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto(message.encode(), name)
            except OSError as error:
                log.warning("notify_failed message=%s error=%r", message, str(error))

    def waits(self) -> None:
        self.send(_WAITING)

    def serves(self) -> None:
        self.send(_READY)

    def ends(self, why: str) -> None:
        self.send(_STATUS + " ".join(why.split())[:_MAX_STATUS_CHARS])

    async def beat_until(self, stopping: asyncio.Event) -> None:
        """Send WATCHDOG=1 while this loop runs, and STOPPING=1 once `stopping` is set."""
        while not stopping.is_set():
            self.send("WATCHDOG=1")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await stopping.wait()
        self.send(_STOPPING)
