"""Phases, silence, and probes over real sockets."""

import asyncio
import os
import socket

import httpx
import pytest

from net.ipv6 import LOOPBACKS, needs_ipv6
from services.process.health import (
    DEAF_S,
    Health,
    Lifecycle,
    ProcessPhase,
    SilentLooks,
    answering,
    joint_health,
)
from services.process.notify import NOTIFY_SOCKET, Notifier, listening
from services.values.errors import ConfigError

LONG_S = 20.0  # a deadline for conditions, never waited out


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def until(condition):
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_starting_is_neither_started_nor_ready_and_lives():
    assert Lifecycle("it").health() == Health("it is starting", "it is starting", "")


def test_serving_passes_every_probe_and_stopping_all_but_ready():
    lifecycle = Lifecycle("it")
    lifecycle.enter(ProcessPhase.SERVING)
    assert lifecycle.health() == Health()
    lifecycle.enter(ProcessPhase.STOPPING)
    assert lifecycle.health() == Health(ready="it is stopping")


def test_one_that_waits_for_etcd_has_started_and_is_not_ready():
    lifecycle = Lifecycle("it")
    lifecycle.enter(ProcessPhase.WAITING)
    assert lifecycle.health() == Health(ready="it is waiting for etcd")


@pytest.mark.parametrize("phase", [ProcessPhase.WAITING, ProcessPhase.SERVING])
def test_another_life_is_started_for_a_probe_but_not_ready(phase):
    lifecycle = Lifecycle("it")
    lifecycle.enter(phase)
    lifecycle.begin()
    assert lifecycle.health() == Health(ready="it is starting")


@pytest.mark.parametrize("phase", [ProcessPhase.WAITING, ProcessPhase.SERVING])
def test_only_one_that_has_started_can_be_too_silent(phase):
    clock = Clock()
    lifecycle = Lifecycle("it", clock)
    lifecycle.last_beat = clock.now
    clock.now += DEAF_S
    assert lifecycle.health().live == ""
    lifecycle.enter(phase)
    assert lifecycle.health().live == "it has been silent for 90 s"
    lifecycle.last_beat = clock.now
    assert lifecycle.health().live == ""


@pytest.mark.parametrize("phase", [ProcessPhase.WAITING, ProcessPhase.SERVING])
@pytest.mark.parametrize("end", [ProcessPhase.STOPPING, None])
def test_one_that_stood_must_stand_again_in_time(phase, end):
    """However many lives it takes, and however long it stood."""
    clock = Clock()
    lifecycle = Lifecycle("it", clock, restart_timeout_s=600)
    lifecycle.enter(phase)
    clock.now += 3000
    lifecycle.last_beat = clock.now
    if end is not None:
        lifecycle.enter(end)
    lifecycle.begin()
    clock.now += 400
    lifecycle.begin()
    clock.now += 199
    assert lifecycle.health() == Health(ready="it is starting")
    clock.now += 1
    assert lifecycle.health() == Health(ready="it is starting", live="it has been away for 600 s")
    lifecycle.enter(phase)
    assert lifecycle.health().live == ""
    lifecycle.begin()
    assert lifecycle.health().live == ""


def test_a_first_start_takes_what_time_it_takes():
    """The start-up probe's to know."""
    clock = Clock()
    lifecycle = Lifecycle("it", clock, restart_timeout_s=600)
    for _ in range(3):
        lifecycle.begin()
        clock.now += 10_000
    assert lifecycle.health() == Health("it is starting", "it is starting")


def test_etcd_may_be_away_for_as_long_as_it_is():
    clock = Clock()
    lifecycle = Lifecycle("it", clock, restart_timeout_s=600)
    lifecycle.enter(ProcessPhase.SERVING)
    lifecycle.begin()
    lifecycle.enter(ProcessPhase.WAITING)
    clock.now += 10_000
    lifecycle.last_beat = clock.now
    assert lifecycle.health() == Health(ready="it is waiting for etcd")


def test_silence_is_counted_in_looks_and_ends_with_every_beat():
    lifecycle, silence, looks = Lifecycle("it", Clock()), SilentLooks(), []

    def look(beat=None):
        lifecycle.last_beat = beat or lifecycle.last_beat
        silence.look(lifecycle)
        looks.append(silence.looks)

    look(1.0)
    look()
    lifecycle.enter(ProcessPhase.SERVING)
    for beat in (None, None, None, 2.0, None, None):
        look(beat)
    lifecycle.begin()
    look()
    lifecycle.enter(ProcessPhase.SERVING)
    look()  # it has said nothing yet in this life
    assert looks == [0, 0, 0, 1, 2, 0, 1, 2, 0, 0]


def test_a_probe_passes_when_it_passes_for_each():
    parts = [Health(ready="a is starting"), Health(), Health(ready="c is stopping", live="c hangs")]
    assert joint_health(parts) == Health("", "a is starting; c is stopping", "c hangs")
    assert joint_health([Health(), Health()]) == Health()


@pytest.mark.parametrize(
    ("path", "health", "status", "text"),
    [
        ("/live", Health(startup="loading", ready="loading"), 200, "ok\n"),
        ("/startup", Health(startup="loading"), 503, "loading\n"),
        ("/ready", Health(ready="stopping"), 503, "stopping\n"),
        ("/live", Health(live="hangs"), 503, "hangs\n"),
        ("/ready?verbose", Health(), 200, "ok\n"),
        ("/metrics", Health(), 404, "there are /startup, /ready and /live\n"),
    ],
)
async def test_probes_get_a_status_and_the_reason(path, health, status, text):
    async with answering("127.0.0.1", 0, lambda: health) as port, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
        assert (answer.status_code, answer.text) == (status, text)


async def test_what_is_no_probe_is_answered_or_dropped_and_harms_nobody():
    async with answering("127.0.0.1", 0, Health) as port:
        for sent in (b"", b"\r\n\r\n", b"POST /live HTTP/1.1\r\n\r\n", b"x" * 200_000 + b"\n\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            writer.write_eof()
            try:
                answer = await asyncio.wait_for(reader.read(), LONG_S)
            except ConnectionResetError:
                answer = b""
            assert not answer or answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))
            writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/live")).status_code == 200


@needs_ipv6
async def test_probes_come_over_ipv6_too():
    async with answering("::", 0, Health) as port, httpx.AsyncClient() as client:
        for host in LOOPBACKS:
            assert (await client.get(f"http://{host}:{port}/live")).status_code == 200


async def test_no_port_no_probes():
    async with answering("127.0.0.1", None, Health) as port:
        assert port is None


async def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot answer probes on 127.0.0.1:{port}"):
            async with answering("127.0.0.1", port, Health):
                pass


async def test_a_child_tells_its_parent(monkeypatch):
    child, stopping = Lifecycle("child"), asyncio.Event()
    with listening(child) as environment:
        monkeypatch.setenv(NOTIFY_SOCKET, environment[NOTIFY_SOCKET])
        notifier = Notifier()
        assert NOTIFY_SOCKET not in os.environ  # a grandchild must not speak for it
        task = asyncio.create_task(notifier.beat_until(stopping))
        await until(lambda: child.last_beat is not None)
        assert child.phase is ProcessPhase.STARTING
        notifier.waits()
        await until(lambda: child.phase is ProcessPhase.WAITING)
        notifier.serves()
        await until(lambda: child.phase is ProcessPhase.SERVING)
        stopping.set()
        await until(lambda: child.phase is ProcessPhase.STOPPING)
        await task
    assert child.phase is ProcessPhase.STARTING


async def test_a_parent_that_is_gone_is_no_reason_to_fail(monkeypatch, caplog):
    with listening(Lifecycle("child")) as environment:
        notifier = Notifier(environment[NOTIFY_SOCKET])
    notifier.serves()
    assert "notify_failed" in caplog.text


async def test_nobody_asked(monkeypatch):
    monkeypatch.delenv(NOTIFY_SOCKET, raising=False)
    stopping = asyncio.Event()
    stopping.set()
    await Notifier().beat_until(stopping)
