"""A supervisor keeps the rank processes of one worker running.

    start --> running --exits--> reaped --after a delay--> start        (same flags, same ports)
                 |                 |
                 |                 +--refuses to start and has never served--> stop all ranks, exit 78
                 +--no report for a minute, or it stops
                 |  and does not end: it hangs--> SIGKILL, reaped
                 +--SIGTERM or SIGINT to us--> SIGTERM to all, grace, SIGKILL, reaped --> exit 0

A rank that refuses its settings (ConfigError) and has never served would refuse them again. Once it has
served, a refusal is a failure like any other, and does not affect its siblings: another process may have used
its port for a moment, or a file was being replaced.

A rank is a process group of its own, because engines start processes too. A rank counts as gone only when
every process of its group has been killed and reaped, so that after a restart nothing of the old incarnation
can still write. If the supervisor itself is killed, the kernel kills the ranks (PR_SET_PDEATHSIG). Probes are
answered with what the ranks report (services/process/notify.py).
"""

import asyncio
import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from services.host.child_processes import dying_with_us
from services.host.ports import held_ports
from services.observe.log_lines import event
from services.process.health import (
    SILENT_S,
    Health,
    Lifecycle,
    ProcessPhase,
    SilentLooks,
    answering,
    joint_health,
)
from services.process.notify import listening

logger = logging.getLogger(__name__)

# A rank exits so on ConfigError (flags.refusing), or if flags.load refuses a flag.
REFUSALS = (os.EX_CONFIG, 2)

_REAP_INTERVAL_S = 0.01
_SILENCE_CHECK_S = 1.0

# linux/prctl.h defines this number.
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the rank again after `delay_s`; pass `failures` in at its next exit."""

    delay_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class StopAll:
    exit_code: int


@dataclass(frozen=True, slots=True)
class RestartDelays:
    first_s: float = 0.5  # Each failure in a row doubles the delay, up to max_s.
    max_s: float = 10.0
    healthy_s: float = 60.0  # The failures of a rank that lived this long are counted from 0 again.


def on_exit(
    exit_code: int, lived_s: float, failures: int, has_served: bool, delays: RestartDelays = RestartDelays()
) -> Restart | StopAll:
    """Decide what follows when a rank ends by itself.

    There were `failures` exits in a row before this one; `has_served` is about all incarnations.
    """
    if exit_code in REFUSALS and not has_served:
        return StopAll(os.EX_CONFIG)
    failures = 1 if lived_s >= delays.healthy_s else failures + 1
    # The exponent is limited, because after a day of failures the power would overflow.
    delay_s = min(delays.first_s * 2.0 ** min(failures - 1, 32), delays.max_s)
    return Restart(delay_s, failures)


def why_killed(exit_code: int) -> str:
    """Return why a process that ended by itself was killed, or "" if it was not.

    A process that is killed for its use of memory gets no message.
    """
    return "killed, probably out of memory" if exit_code == -signal.SIGKILL else ""


@contextmanager
def chosen_ports(host: str, base_port: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield base_port, base_port + 1, ...; for base_port 0, `count` ports of `held_ports`."""
    if base_port:
        yield tuple(range(base_port, base_port + count))
    else:
        with held_ports(host, count) as ports:
            yield ports


def rank_commands(
    module: str, flags: Sequence[str], flags_by_rank: Mapping[str, Sequence[int]]
) -> list[list[str]]:
    """Return the command of each rank: `python -m module *flags --rank-index=K --NAME=VALUE...`.

    `flags_by_rank` has for each setting's name a value for each rank: {"port": (7000, 7001)}.
    """
    flags_of_name = [[f"--{name}={value}" for value in values] for name, values in flags_by_rank.items()]
    return [
        [sys.executable, "-m", module, *flags, f"--rank-index={index}", *own]
        for index, own in enumerate(zip(*flags_of_name, strict=True))
    ]


def run(
    commands: Sequence[Sequence[str]],
    grace_s: float,
    host: str = "127.0.0.1",
    health_port: int | None = None,
    restart_timeout_s: float = math.inf,
    own_health: Callable[[], Health] = Health,
    inherited: Sequence[Sequence[int]] = (),
) -> int:
    """Supervise until a signal stops us; return the exit code. It must run in the main thread, on Linux.

    A command begins with the path of a program. Probes are answered on host:health_port, or not at all
    (None). /live fails once a rank that has waited or served has not done so again for `restart_timeout_s`.
    `own_health` checks what all ranks share. `inherited` are open files for each life of a rank, by rank.
    """
    ranks = [
        Lifecycle(f"rank process {index}", restart_timeout_s=restart_timeout_s)
        for index in range(len(commands))
    ]

    def check() -> Health:
        return joint_health([own_health(), *(rank.health() for rank in ranks)])

    return asyncio.run(_run(commands, grace_s, host, health_port, ranks, check, inherited))


async def _run(
    commands: Sequence[Sequence[str]],
    grace_s: float,
    host: str,
    health_port: int | None,
    ranks: Sequence[Lifecycle],
    check: Callable[[], Health],
    inherited: Sequence[Sequence[int]],
) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with answering(host, health_port, check):
        return await supervise(commands, grace_s, stopping, ranks, inherited=inherited)


async def supervise(
    commands: Sequence[Sequence[str]],
    grace_s: float,
    stopping: asyncio.Event,
    ranks: Sequence[Lifecycle],
    delays: RestartDelays = RestartDelays(),
    inherited: Sequence[Sequence[int]] = (),
) -> int:
    """Keep one process per command running until `stopping` is set; return the exit code.

    It updates `ranks`, one for each command. A rank that refuses its settings and has never served sets
    `stopping`. When this returns, every process that it started has been reaped.
    """
    _become_subreaper()
    async with asyncio.TaskGroup() as group:
        keepers = [
            group.create_task(
                _RankProcess(index, command, grace_s, stopping, delays, rank, fds).keep_running()
            )
            for index, (command, rank, fds) in enumerate(
                zip(commands, ranks, inherited or [()] * len(commands), strict=True)
            )
        ]
    return max(keeper.result() for keeper in keepers)


@dataclass(frozen=True, slots=True)
class _RankProcess:
    index: int
    command: Sequence[str]
    grace_s: float
    stopping: asyncio.Event
    delays: RestartDelays
    lifecycle: Lifecycle
    inherited: Sequence[int]  # They are open files for each life.

    async def keep_running(self) -> int:
        loop = asyncio.get_running_loop()
        failures = 0
        while not self.stopping.is_set():
            started = loop.time()
            with listening(self.lifecycle) as environment:
                exit_code, by_itself = await self._live_once(environment)
            lived_s = loop.time() - started
            killed = why_killed(exit_code) if by_itself else ""
            why = killed or self.lifecycle.last_words
            reason: dict[str, Any] = {"why": why} if why else {}
            level = logging.WARNING if killed else logging.INFO
            event(logger, "rank_exited", level, rank=self.index, code=exit_code, lived_s=lived_s, **reason)
            if self.stopping.is_set():
                break
            self.lifecycle.last_end = f"exit code {exit_code}" + (f", {why}" if why else "")
            match on_exit(exit_code, lived_s, failures, self.lifecycle.has_served, self.delays):
                case StopAll(supervisor_code):
                    self.stopping.set()
                    return supervisor_code
                case Restart(delay_s, failures):
                    event(logger, "rank_restarts", rank=self.index, delay_s=delay_s, failures=failures)
                    await self._sleep(delay_s)
        return os.EX_OK

    async def _live_once(self, environment: Mapping[str, str]) -> tuple[int, bool]:
        """Run one incarnation, with `environment` added to ours.

        Returns its exit code, or minus the signal that killed it, and whether it ended before we stopped it.
        When this returns, the rank's whole process group has been reaped.
        """
        try:
            process = _start(self.command, environment, self.inherited)
        except OSError as error:  # The machine has no process to give at present.
            event(logger, "rank_start_failed", logging.ERROR, rank=self.index, error=error)
            return os.EX_OSERR, True
        event(logger, "rank_started", rank=self.index, pid=process.pid)
        exited = asyncio.create_task(_exited(process.pid))
        stopped = asyncio.create_task(self.stopping.wait())
        hanging = asyncio.create_task(self._hangs())
        await asyncio.wait([exited, stopped, hanging], return_when=asyncio.FIRST_COMPLETED)
        by_itself = exited.done()
        if not by_itself and stopped.done():
            os.kill(process.pid, signal.SIGTERM)
            await asyncio.wait([exited], timeout=self.grace_s)
        for waiting in (exited, stopped, hanging):
            waiting.cancel()
        await _reap_group(process)
        return process.returncode, by_itself

    async def _hangs(self) -> None:
        """Return when the rank has waited or served and then stopped reporting, or stops for longer than the
        grace. A signal that it could handle would have no effect then.
        """
        silence, ending = SilentLooks(), 0
        while silence.looks * _SILENCE_CHECK_S < SILENT_S and ending * _SILENCE_CHECK_S < self.grace_s:
            await asyncio.sleep(_SILENCE_CHECK_S)
            silence.look(self.lifecycle)
            ending = ending + 1 if self.lifecycle.phase is ProcessPhase.STOPPING else 0
        event(logger, "rank_hangs", logging.ERROR, rank=self.index, phase=self.lifecycle.phase.value)

    async def _sleep(self, delay_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self.stopping.wait()


def _start(
    command: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    # The rank has a session of its own, so that Ctrl-C reaches only the supervisor, which stops the ranks.
    return subprocess.Popen(
        dying_with_us(command),
        env={**os.environ, **environment},
        start_new_session=True,
        pass_fds=inherited,
    )


def _become_subreaper() -> None:
    """Make orphans of a dead rank our children, so that we can wait for their end."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


async def _exited(pid: int) -> None:
    """Return when our child `pid` has ended; it is not reaped, so that the pid still belongs to it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _reap_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while process.poll() is None:
        await asyncio.sleep(_REAP_INTERVAL_S)
    # The leader has ended, so its orphans are our children now. ChildProcessError means that none is left.
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-process.pid, os.WNOHANG)
            if pid == 0:
                await asyncio.sleep(_REAP_INTERVAL_S)
