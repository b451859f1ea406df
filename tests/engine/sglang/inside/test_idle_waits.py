"""These tests show what keeps SGLang's loops from spinning, without SGLang."""

import select
import threading
from types import SimpleNamespace

from services.engine.sglang.inside.idle_waits import (
    WaitingSocket,
    WakeUp,
    transfer_news,
    wait_for_news,
    wait_for_requests,
)


class Poller:
    """What the hooks use of zmq.Poller; remembers what each poll saw."""

    def __init__(self):
        self.fds, self.seen = [], []
        self._poll = select.poll()

    def __contains__(self, fd):
        return fd in self.fds

    def register(self, fd, flags):
        self.fds.append(fd)
        self._poll.register(fd, flags)

    def poll(self, timeout_ms):
        self.seen.append(self._poll.poll(timeout_ms))


class Socket:
    """Has one message once it has been polled."""

    linger = 7

    def __init__(self):
        self.calls = []

    def poll(self, timeout_ms):
        assert timeout_ms > 0
        self.calls.append("poll")

    def recv(self, flags=0):
        self.calls.append(f"recv {flags}")
        return b"bytes"

    def recv_pyobj(self, flags=0):
        self.calls.append(f"recv_pyobj {flags}")
        return "object"


def test_news_of_a_transfer_end_the_wait_once():
    poller = Poller()
    scheduler = SimpleNamespace(idle_sleeper=SimpleNamespace(poller=poller))
    transfer_news().clear()
    teller = threading.Thread(target=transfer_news().set)
    teller.start()
    teller.join()
    wait_for_news(None, scheduler)
    wait_for_news(None, scheduler)
    fd = transfer_news().fd
    assert poller.seen == [[(fd, select.POLLIN)], []]
    assert poller.fds == [fd]  # registered once


def test_who_waits_is_woken_once(subtests):
    for sleeper in [None, SimpleNamespace(rust_server=None)]:
        with subtests.test(sleeper=sleeper):
            wait_for_news(None, SimpleNamespace(idle_sleeper=sleeper))
    with subtests.test("a wake up may be set often and cleared when it is not set"):
        wake_up, poll = WakeUp(), select.poll()
        poll.register(wake_up.fd, select.POLLIN)
        wake_up.clear()
        assert poll.poll(0) == []
        wake_up.set()
        wake_up.set()
        assert poll.poll(0) == [(wake_up.fd, select.POLLIN)]
        wake_up.clear()
        assert poll.poll(0) == []


def test_a_controller_waits_with_sleep_on_idle_alone(subtests):
    with subtests.test("the controller waits before it receives"):
        socket = Socket()
        controller = SimpleNamespace(
            server_args=SimpleNamespace(sleep_on_idle=True), recv_from_tokenizer=socket
        )
        wait_for_requests(controller)
        waiting = controller.recv_from_tokenizer
        assert isinstance(waiting, WaitingSocket)
        assert (waiting.recv(flags=1), waiting.recv_pyobj(flags=1), waiting.linger) == (b"bytes", "object", 7)
        assert socket.calls == ["poll", "recv 1", "poll", "recv_pyobj 1"]
    with subtests.test("the controller keeps its socket without sleep on idle"):
        socket = Socket()
        controller = SimpleNamespace(
            server_args=SimpleNamespace(sleep_on_idle=False), recv_from_tokenizer=socket
        )
        wait_for_requests(controller)
        assert controller.recv_from_tokenizer is socket
