"""SGLang's loops wait for events instead of spinning.

While transfers are in progress, a scheduler without a batch spins, and the DP controller always does. Where
cores are few this takes them from the processes that create the events: other ranks, tokenizers, the
transfer's threads, our streams. With `--sleep-on-idle` (always on a CPU) they wait instead. An idle scheduler
waits in SGLang's own idle poll, with our descriptors added, for a request or for news of a transfer. The DP
controller polls its socket for a message of SGLang's own.
"""

import os
from contextlib import suppress
from functools import cache
from select import POLLIN  # zmq's is the same.
from typing import Any

# Conditions without an event (a peer's directory, a timeout) are checked this often.
_TRANSFERS_WAIT_MS = 10
_CONTROLLER_WAIT_MS = 1000


more_fds: list[int] = []  # They are readable when there is other work for the scheduler.


class WakeUp:
    """It wakes the thread that polls `fd`; `set` may be called from any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):  # It was not set.
            os.eventfd_read(self.fd)


@cache
def transfer_news() -> WakeUp:
    return WakeUp()


def wait_for_news(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Wait after Scheduler.on_idle, which returns at once while transfers are in progress."""
    poller = getattr(scheduler.idle_sleeper, "poller", None)
    if poller is None:
        return  # There is no --sleep-on-idle, or the rank follows another one's requests.
    news = transfer_news()
    for fd in (news.fd, *more_fds):
        if fd not in poller:
            poller.register(fd, POLLIN)
    poller.poll(_TRANSFERS_WAIT_MS)
    news.clear()


def wait_for_requests(controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """Make DataParallelController.event_loop wait, which polls its socket without a pause."""
    if controller.server_args.sleep_on_idle:
        controller.recv_from_tokenizer = WaitingSocket(controller.recv_from_tokenizer)


class WaitingSocket:
    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        self._socket.poll(_CONTROLLER_WAIT_MS)
        return self._socket.recv(*args, **kwargs)

    def recv_pyobj(self, *args: Any, **kwargs: Any) -> Any:
        self._socket.poll(_CONTROLLER_WAIT_MS)
        return self._socket.recv_pyobj(*args, **kwargs)
