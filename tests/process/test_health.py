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


def test_silence(subtests):
    for phase in [ProcessPhase.WAITING, ProcessPhase.SERVING]:
        with subtests.test("only one that has started can be too silent", phase=phase):
            clock = Clock()
            lifecycle = Lifecycle("it", clock)
            lifecycle.last_beat = clock.now
            clock.now += DEAF_S
            assert lifecycle.health().live == ""
            lifecycle.enter(phase)
            assert lifecycle.health().live == "it has been silent for 90 s"
            lifecycle.last_beat = clock.now
            assert lifecycle.health().live == ""
    # However many lives it takes, and however long it stood.
    for phase in [ProcessPhase.WAITING, ProcessPhase.SERVING]:
        for end in [ProcessPhase.STOPPING, None]:
            with subtests.test("one that stood must stand again in time", phase=phase, end=end):
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
    # The start-up probe's to know.
    with subtests.test("a first start takes what time it takes"):
        clock = Clock()
        lifecycle = Lifecycle("it", clock, restart_timeout_s=600)
        for _ in range(3):
            lifecycle.begin()
            clock.now += 10_000
        assert lifecycle.health() == Health("it is starting", "it is starting")
    with subtests.test("etcd may be away for as long as it is"):
        clock = Clock()
        lifecycle = Lifecycle("it", clock, restart_timeout_s=600)
        lifecycle.enter(ProcessPhase.SERVING)
        lifecycle.begin()
        lifecycle.enter(ProcessPhase.WAITING)
        clock.now += 10_000
        lifecycle.last_beat = clock.now
        assert lifecycle.health() == Health(ready="it is waiting for etcd")
    with subtests.test("silence is counted in looks and ends with every beat"):
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


def test_probes_of_a_phase(subtests):
    with subtests.test("starting is neither started nor ready and lives"):
        assert Lifecycle("it").health() == Health("it is starting", "it is starting", "")
    with subtests.test("serving passes every probe and stopping all but ready"):
        lifecycle = Lifecycle("it")
        lifecycle.enter(ProcessPhase.SERVING)
        assert lifecycle.health() == Health()
        lifecycle.enter(ProcessPhase.STOPPING)
        assert lifecycle.health() == Health(ready="it is stopping")
    with subtests.test("one that waits for etcd has started and is not ready"):
        lifecycle = Lifecycle("it")
        lifecycle.enter(ProcessPhase.WAITING)
        assert lifecycle.health() == Health(ready="it is waiting for etcd")
    for phase in [ProcessPhase.WAITING, ProcessPhase.SERVING]:
        with subtests.test("another life is started for a probe but not ready", phase=phase):
            lifecycle = Lifecycle("it")
            lifecycle.enter(phase)
            lifecycle.begin()
            assert lifecycle.health() == Health(ready="it is starting")
    with subtests.test("a probe passes when it passes for each"):
        parts = [Health(ready="a is starting"), Health(), Health(ready="c is stopping", live="c hangs")]
        assert joint_health(parts) == Health("", "a is starting; c is stopping", "c hangs")
        assert joint_health([Health(), Health()]) == Health()


@needs_ipv6
async def test_probes_come_over_ipv6_too():
    async with answering("::", 0, Health) as port, httpx.AsyncClient() as client:
        for host in LOOPBACKS:
            assert (await client.get(f"http://{host}:{port}/live")).status_code == 200


async def test_the_port_of_probes(subtests):
    for path, health, status, text in [
        ("/live", Health(startup="loading", ready="loading"), 200, "ok\n"),
        ("/startup", Health(startup="loading"), 503, "loading\n"),
        ("/ready", Health(ready="stopping"), 503, "stopping\n"),
        ("/live", Health(live="hangs"), 503, "hangs\n"),
        ("/ready?verbose", Health(), 200, "ok\n"),
        ("/metrics", Health(), 404, "there are /startup, /ready and /live\n"),
    ]:
        with subtests.test(
            "probes get a status and the reason", path=path, health=health, status=status, text=text
        ):
            async with (
                answering("127.0.0.1", 0, lambda health=health: health) as port,
                httpx.AsyncClient() as client,
            ):
                answer = await client.get(f"http://127.0.0.1:{port}{path}")
                assert (answer.status_code, answer.text) == (status, text)
    with subtests.test("what is no probe is answered or dropped and harms nobody"):
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
    with subtests.test("no port no probes"):
        async with answering("127.0.0.1", None, Health) as port:
            assert port is None
    with subtests.test("a port that is taken is refused"), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot answer probes on 127.0.0.1:{port}"):
            async with answering("127.0.0.1", port, Health):
                pass


async def test_what_a_child_tells(subtests, monkeypatch, caplog):
    with subtests.test("a child tells its parent"), monkeypatch.context() as patch:
        child, stopping = Lifecycle("child"), asyncio.Event()
        with listening(child) as environment:
            patch.setenv(NOTIFY_SOCKET, environment[NOTIFY_SOCKET])
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
    with subtests.test("a parent that is gone is no reason to fail"), monkeypatch.context() as patch:
        with listening(Lifecycle("child")) as environment:
            notifier = Notifier(environment[NOTIFY_SOCKET])
        notifier.serves()
        assert "notify_failed" in caplog.text
    with subtests.test("nobody asked"), monkeypatch.context() as patch:
        patch.delenv(NOTIFY_SOCKET, raising=False)
        stopping = asyncio.Event()
        stopping.set()
        await Notifier().beat_until(stopping)
