"""These tests show what follows an exit, and real processes started, restarted, stopped and reaped."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.process import supervisor
from services.process.health import Health, Lifecycle
from services.process.supervisor import Restart, RestartDelays, StopAll, on_exit

LONG_S = 20.0  # a deadline for conditions, never waited out


@given(st.integers(-64, 255), st.floats(0, 59), st.integers(0, 10**6))
def test_delays_grow_and_are_bounded(code, lived_s, failures):
    decision = on_exit(code, lived_s, failures, has_served=True)
    later = on_exit(code, lived_s, decision.failures, has_served=True)
    assert 0.5 <= decision.delay_s <= later.delay_s <= 10
    assert decision.failures == failures + 1


@given(st.integers(-64, 255).filter(lambda code: code not in (2, 78)))
def test_any_other_failure_stops_nobody_else(code):
    """Of a first start too: 75 says that another one may do."""
    assert on_exit(code, 1.0, 0, has_served=False) == Restart(0.5, 1)


def test_how_restarts_are_decided(subtests):
    with subtests.test("the first delays"):
        delays, failures = [], 0
        for _ in range(7):
            decision = on_exit(1, 0.1, failures, has_served=False)
            failures = decision.failures
            delays.append(decision.delay_s)
        assert delays == [0.5, 1, 2, 4, 8, 10, 10]
    with subtests.test("a healthy life forgives"):
        assert on_exit(-9, 60.0, 5, has_served=True) == Restart(0.5, 1)
    for code in [78, 2]:
        with subtests.test("a refusal stops all unless the rank has served", code=code):
            assert on_exit(code, 1.0, 0, has_served=False) == StopAll(78)
            assert on_exit(code, 1.0, 0, has_served=True) == Restart(0.5, 1)
    with (
        subtests.test("ports count up from the base"),
        supervisor.chosen_ports("127.0.0.1", 7000, 3) as ports,
    ):
        assert ports == (7000, 7001, 7002)
    with subtests.test("each rank gets its own flags"):
        commands = supervisor.rank_commands(
            "services.decode", ["--model=m"], {"port": (7, 8), "metrics-port": (17, 18)}
        )
        head = [sys.executable, "-m", "services.decode", "--model=m"]
        assert commands == [
            [*head, "--rank-index=0", "--port=7", "--metrics-port=17"],
            [*head, "--rank-index=1", "--port=8", "--metrics-port=18"],
        ]


async def until(condition):
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.005)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def alive(pid: int) -> bool:
    """False for a zombie as well: it can do nothing any more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


@contextlib.asynccontextmanager
async def supervising(commands, grace_s=LONG_S):
    """Yields the supervising task; whatever happens, its processes are gone at the end."""
    stopping, ranks = asyncio.Event(), [Lifecycle(f"rank {index}") for index in range(len(commands))]
    task = asyncio.create_task(
        supervisor.supervise(commands, grace_s, stopping, ranks, RestartDelays(0.001, 0.01))
    )
    task.stop, task.ranks = stopping.set, ranks
    try:
        yield task
    finally:
        stopping.set()
        await asyncio.wait([task], timeout=LONG_S)


async def test_a_dead_rank_is_started_again_and_the_others_live_on(tmp_path):
    marks = tmp_path / "marks"
    dying, living = f"echo dying $$ >>{marks}; exit 3", f"echo living $$ >>{marks}; exec sleep 1000"
    async with supervising([shell(dying), shell(living)]) as task:
        await until(lambda: sum("dying" in line for line in lines(marks)) >= 3)
        await until(lambda: any("living" in line for line in lines(marks)))
        assert not task.done()
        task.stop()
        assert await asyncio.wait_for(task, LONG_S) == 0
    assert sum("living" in line for line in lines(marks)) == 1
    assert not any(alive(int(line.split()[1])) for line in lines(marks))


async def test_exits_are_logged(subtests, tmp_path_factory, caplog):
    with subtests.test("exits are logged with their code"):
        tmp_path = tmp_path_factory.mktemp("case")
        caplog.set_level("INFO")
        marks = tmp_path / "marks"
        async with supervising([shell(f"echo >>{marks}; kill -9 $$")]):
            await until(lambda: len(lines(marks)) >= 2)
        assert "rank_exited rank=0 code=-9" in caplog.text
        assert 'why="killed, probably out of memory"' in caplog.text
        first = next(record for record in caplog.records if "rank_exited" in record.message)
        assert first.levelname == "WARNING"  # a later life may end with the test
    with subtests.test("who is killed by us was not short of memory"):
        tmp_path = tmp_path_factory.mktemp("case")
        caplog.clear()
        caplog.set_level("INFO")
        marks = tmp_path / "marks"
        async with supervising(
            [shell(f"trap '' TERM; echo >>{marks}; exec sleep 1000")], grace_s=0.05
        ) as task:
            await until(lambda: lines(marks))
            task.stop()
            assert await asyncio.wait_for(task, LONG_S) == 0
        assert "rank_exited rank=0 code=-9" in caplog.text and "out of memory" not in caplog.text


async def test_a_rank_that_refuses_its_settings_stops_all(tmp_path):
    marks = tmp_path / "marks"
    refusing = f"while ! grep -q started {marks}; do sleep 0.01; done; exit 78"
    living = f"echo started $$ >>{marks}; exec sleep 1000"
    async with supervising([shell(refusing), shell(living)]) as task:
        assert await asyncio.wait_for(task, LONG_S) == 78
    assert not alive(int(lines(marks)[0].split()[1]))


async def refuse_later(what, tmp_path, caplog):
    caplog.clear()
    caplog.set_level("INFO")
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    living = f"echo living $$ >>{marks}; exec sleep 1000"
    async with supervising([refusing_after(marks, gate, what), shell(living)]) as task:
        rank = task.ranks[0]
        if what == "waits":
            assert await asyncio.wait_for(task, LONG_S) == 78
            return
        await until(lambda: sum("a life" in line for line in lines(marks)) >= 4)
        assert not task.done()
        await until(lambda: rank.health().ready.endswith("exit code 78, the port is taken by somebody"))
        gate.touch()  # what stood in its way has passed
        await until(lambda: rank.health() == Health())
        task.stop()
        assert await asyncio.wait_for(task, LONG_S) == 0
    assert sum("living" in line for line in lines(marks)) == 1
    assert (
        "rank_exited rank=0 code=78" in caplog.text and 'why="the port is taken by somebody"' in caplog.text
    )


async def test_a_rank_that_refuses_once_it_has_served_stops_nobody_else(tmp_path_factory, caplog, subtests):
    """Its first life serves, or only waits for etcd and is then refused; its next ones refuse to start."""
    for what in ("serves", "waits"):
        with subtests.test(what):
            await refuse_later(what, tmp_path_factory.mktemp(what), caplog)


def refusing_after(marks: Path, gate: Path, what: str) -> list[str]:
    """A rank that refuses to start until there is a gate; in its first life it says first that it `what`."""
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from services.process import signals\n"
        "from services.settings.flags import refusing\n"
        "from services.values.errors import ConfigError\n"
        "from services.process.notify import Notifier\n"
        "notifier, (marks, gate) = Notifier(), map(Path, sys.argv[1:3])\n"
        "async def serve():\n"
        "    stopping = signals.stop_on_signals()\n"
        "    notifier.serves()\n"
        "    await notifier.beat_until(stopping)\n"
        "first = not marks.exists() or 'a life' not in marks.read_text()\n"
        "print('a life', file=marks.open('a'))\n"
        "if gate.exists():\n"
        "    asyncio.run(serve())\n"
        "    sys.exit()\n"
        "if first:\n"
        "    getattr(notifier, sys.argv[3])()\n"
        "with refusing('rank', notifier.ends):\n"
        "    raise ConfigError('the port is taken by somebody')\n"
    )
    return [sys.executable, "-c", code, str(marks), str(gate), what]


async def test_stopping_asks_first(tmp_path):
    marks = tmp_path / "marks"
    polite = f"trap 'echo asked >>{marks}; exit 0' TERM; echo up >>{marks}; while :; do sleep 0.01; done"
    async with supervising([shell(polite)]) as task:
        await until(lambda: lines(marks) == ["up"])
        task.stop()
        assert await asyncio.wait_for(task, LONG_S) == 0
    assert lines(marks) == ["up", "asked"]


async def test_a_rank_that_will_not_stop_is_killed(tmp_path):
    marks = tmp_path / "marks"
    stubborn = f"trap '' TERM; echo $$ >>{marks}; while :; do sleep 0.01; done"
    async with supervising([shell(stubborn)], grace_s=0.05) as task:
        await until(lambda: lines(marks))
        task.stop()
        assert await asyncio.wait_for(task, LONG_S) == 0
    assert not alive(int(lines(marks)[0]))


async def test_a_restart_comes_after_every_process_of_the_old_life_is_gone(tmp_path):
    """The old life leaves a child behind, as an engine with its own scheduler process would."""
    marks = tmp_path / "marks"
    leaving = f"sleep 1000 & echo $! >>{marks}; exit 1"
    seen_alive = []
    async with supervising([shell(leaving)]):
        for life in range(1, 4):
            await until(lambda wanted=life: len(lines(marks)) > wanted)
            seen_alive += [pid for pid in lines(marks)[:life] if alive(int(pid))]
    assert seen_alive == []


async def test_a_command_that_cannot_start_is_tried_again(tmp_path, caplog):
    caplog.set_level("INFO")
    command = tmp_path / "later"
    async with supervising([[str(command)]]) as task:
        await until(lambda: "rank_exited rank=0 code=1" in caplog.text)
        assert not task.done()
        script = tmp_path / "script"
        script.write_text(f"#!/bin/sh\necho up >>{tmp_path}/marks; exec sleep 1000\n")
        script.chmod(0o755)
        script.rename(command)
        await until(lambda: lines(tmp_path / "marks") == ["up"])


async def test_no_process_to_be_had_is_tried_again(monkeypatch, caplog):
    start, failing = subprocess.Popen, [OSError(11, "no more processes")]

    def popen(*args, **options):
        if failing:
            raise failing.pop()
        return start(*args, **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", popen)
    async with supervising([announcing("true")]) as task:
        await until(lambda: task.ranks[0].health() == Health())
    assert "rank_start_failed" in caplog.text


def announcing(before: str, what: str = "serves") -> list[str]:
    """A rank that runs `before`, says that it serves (or waits), and that it stops when it is told to."""
    code = (
        "import asyncio, subprocess, sys\n"
        "from services.process import signals\n"
        "from services.process.notify import Notifier\n"
        "async def run():\n"
        "    stopping = signals.stop_on_signals()\n"
        "    subprocess.run(sys.argv[1], shell=True, check=True)\n"
        "    notifier = Notifier()\n"
        "    getattr(notifier, sys.argv[2])()\n"
        "    await notifier.beat_until(stopping)\n"
        "asyncio.run(run())\n"
    )
    return [sys.executable, "-c", code, before, what]


async def test_what_a_rank_says_of_itself_is_what_probes_are_told(tmp_path):
    """Started is for good; ready is for as long as the life that said so."""
    gate, marks = tmp_path / "gate", tmp_path / "marks"
    loading = f"echo >>{marks}; while [ ! -e {gate} ]; do sleep 0.01; done"
    async with supervising([announcing(loading)]) as task:
        (rank,) = task.ranks
        await until(lambda: len(lines(marks)) == 1)
        assert rank.health().startup == rank.health().ready == "rank 0 is starting"
        gate.touch()
        await until(lambda: rank.health() == Health())
        gate.unlink()
        await asyncio.to_thread(kill_rank, gate)
        await until(lambda: len(lines(marks)) == 2)
        ended = "exit code -9, killed, probably out of memory"
        why = f"rank 0 is starting; its last life ended with {ended}"
        assert rank.health() == Health(ready=why)
        rank.restart_timeout_s = 0.01  # its second start hangs
        await until(lambda: rank.health().live.startswith("rank 0 has been away for"))
        gate.touch()
        await until(lambda: rank.health() == Health())
        task.stop()
        await until(lambda: rank.health().ready)
        assert await asyncio.wait_for(task, LONG_S) == 0


async def kill_who_hangs(what, health, marks, monkeypatch, caplog):
    caplog.clear()
    monkeypatch.setattr(supervisor, "_SILENCE_CHECK_S", 0.01)
    async with supervising([announcing(f"echo >>{marks}", what)]) as task:
        (rank,) = task.ranks
        await until(lambda: rank.health() == health)
        await asyncio.to_thread(kill_rank, marks, signal.SIGSTOP)
        monkeypatch.setattr(supervisor, "SILENT_S", 1.0)
        await until(lambda: len(lines(marks)) == 2)
        monkeypatch.setattr(supervisor, "SILENT_S", 60.0)
        await until(lambda: rank.health() == health)
    assert "rank_hangs" in caplog.text


async def test_a_rank_that_hangs_is_killed_and_started_again(tmp_path, monkeypatch, caplog, subtests):
    for what, health in [("serves", Health()), ("waits", Health(ready="rank 0 is waiting for etcd"))]:
        with subtests.test(what), monkeypatch.context() as patching:
            await kill_who_hangs(what, health, tmp_path / what, patching, caplog)


async def test_a_rank_that_stops_and_does_not_end_is_killed_and_started_again(tmp_path, monkeypatch, caplog):
    """Its engine hangs: it gives up by itself, and its exit waits for a driver."""
    monkeypatch.setattr(supervisor, "_SILENCE_CHECK_S", 0.01)
    marks = tmp_path / "marks"
    code = (
        "import sys, time\n"
        "from services.process.notify import Notifier\n"
        "notifier = Notifier()\n"
        "notifier.serves()\n"
        "print(file=open(sys.argv[1], 'a'))\n"
        "notifier.send('STOPPING=1')\n"
        "time.sleep(1000)\n"
    )
    async with supervising([[sys.executable, "-c", code, str(marks)]], grace_s=0.1):
        await until(lambda: len(lines(marks)) == 2)
    assert "rank_hangs rank=0 phase=stopping" in caplog.text


def kill_rank(gate: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """The announcing rank's own process: the one whose command line holds the gate."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(gate) in path.read_text() and "Notifier" in path.read_text():
                os.kill(int(path.parent.name), number)


def start_supervisor(script: str) -> subprocess.Popen[bytes]:
    code = "import sys; from services.process.supervisor import run; sys.exit(run([sys.argv[1:]], 10.0))"
    return subprocess.Popen([sys.executable, "-c", code, *shell(script)])


async def stop_by(number, marks):
    process = start_supervisor(f"echo $$ >>{marks}; exec sleep 1000")
    try:
        await until(lambda: lines(marks))
        process.send_signal(number)
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
    assert not alive(int(lines(marks)[0]))


async def test_a_signal_stops_the_process_with_exit_code_0(tmp_path, subtests):
    for number in (signal.SIGTERM, signal.SIGINT):
        with subtests.test(number=number):
            await stop_by(number, tmp_path / str(number))


async def test_ranks_die_with_a_killed_supervisor(tmp_path):
    marks = tmp_path / "marks"
    process = start_supervisor(f"echo $$ >>{marks}; exec sleep 1000")
    try:
        await until(lambda: lines(marks))
    finally:
        process.kill()
        process.wait(LONG_S)
    rank = int(lines(marks)[0])
    try:
        await until(lambda: not alive(rank))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def rank_of(worker: subprocess.Popen[bytes]) -> str:
    """The command line of its rank process; empty until there is one."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    return next((command for command in commands if "--rank-index" in command), "")


def start_worker(marks: Path) -> subprocess.Popen[bytes]:
    """A real decode worker's supervisor, with as many threads as its libraries start. It writes to `marks`
    whenever Python would run in a child between fork and exec."""
    flags = ["--engine=fake", "--worker=w", "--etcd=127.0.0.1:1", "--grace-s=0"]
    code = (
        "import os, sys\n"
        "from services.decode.decode_service import decode_roles\n"
        "from services.rank.main import main\n"
        "from services.values.rank import Role\n"
        f"os.register_at_fork(before=lambda: print('forks', file=open({str(marks)!r}, 'a')))\n"
        "main('services.decode', {Role.DECODE: decode_roles})\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen([sys.executable, "-c", code, *flags], env=environment)


async def test_a_supervisor_with_threads_runs_nothing_between_fork_and_exec(tmp_path):
    """Where another thread holds a lock, the child would wait for it for ever."""
    process = start_worker(tmp_path / "marks")
    try:
        await until(lambda: rank_of(process))
        assert lines(tmp_path / "marks") == []
        num_threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
        assert num_threads > 1 or os.cpu_count() == 1  # numpy's
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
