"""One run, from an empty folder to what is left behind."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from bench.chaos.answers import Answer, Ended, Span
from bench.chaos.clients import Clients
from bench.chaos.left_behind import marked_processes, shared_memory
from bench.chaos.load import Load
from bench.chaos.oracle import Checked, FakeOracle, Oracle
from bench.chaos.processes import MARK, Processes, marked, rank_flags, shape_of
from bench.chaos.schedule import QUIET_S, Layout, Wave, waves
from bench.chaos.verdict import Books, Judged, Run, wrong_of
from bench.etcd_nodes import NUM_NODES, EtcdNodes
from services.cli.model.make_model import make_model

LAYOUT = Layout(
    prefill_workers=2, prefill_dp_size=1, decode_workers=2, decode_dp_size=2, routers=2, members=NUM_NODES
)
MENDED_S = 300.0  # starting a rank takes 11 s of a core, and four may start at a time on a busy machine
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    minutes: float
    seed: int
    engine: str
    transport: str


async def judged_run(settings: Settings, folder: Path, log: Path | None, say: Say) -> Run:
    checkpoint = folder / "model"
    make_model(checkpoint)
    before = shared_memory()
    with marked() as mark:
        async with EtcdNodes(folder / "etcd") as nodes:
            shape = shape_of(
                LAYOUT,
                checkpoint,
                folder / "data",
                nodes.endpoints,
                rank_flags(settings.engine, settings.transport, folder / "tiers"),
            )
            log_file = log or folder / "services.log"
            processes = Processes(LAYOUT, shape, nodes, mark, log_file, folder / "tiers")
            chaos = Chaos(processes, settings, say)
            async with processes:
                await chaos.play()
                ranks = await _ranks_that_hold(processes)
                await chaos.read_tiers()
                open_files = processes.ranks.tier_files_too_many()
            say("stopped; waiting for leases to lapse")
            in_etcd = await processes.until_forgotten()
        left = [f"{pid}: {command}" for pid, command in marked_processes(MARK, mark).items()]
    books = Books(
        {**ranks, **open_files}, in_etcd, left, sorted(shared_memory() - before), processes.exit_codes()
    )
    answers = chaos.load.answers
    say(f"checking {sum(len(a.tokens) for a in answers)} tokens of {len(answers)} answers")
    return Run(
        seconds=chaos.seconds,
        judged=judge(answers, FakeOracle() if settings.engine == "fake" else Oracle(checkpoint)),
        played=processes.played,
        waves=chaos.waves,
        unmended=chaos.unmended,
        tracebacks=dict(processes.ranks.tracebacks),
        digest_mismatches=processes.digest_mismatches,
        books=books,
        handed_tokens=processes.handed_tokens,
        found_tokens=processes.found_tokens,
        read_tokens=sum(read for read, _ in chaos.read_tokens.values()),
        shared_tokens=sum(shared for _, shared in chaos.read_tokens.values()),
    )


class Chaos:
    """Waves of faults under load, and a quiet end."""

    def __init__(self, processes: Processes, settings: Settings, say: Say) -> None:
        self.load = Load(Clients(processes), settings.seed)
        self.waves: list[Span] = []
        self.unmended: list[str] = []
        self.seconds = 0.0
        # From tiers, and of that from others' files, by rank and life.
        self.read_tokens: dict[tuple[str, int], tuple[float, float]] = {}
        self._processes, self._settings, self._say = processes, settings, say

    async def play(self) -> None:
        began = time.monotonic()
        self._say("ready")
        try:
            async with asyncio.TaskGroup() as group:
                ending = asyncio.Event()
                group.create_task(self.load.run(ending))
                for wave in self._while_there_is_time(began):
                    await self._play(wave)
                    await asyncio.sleep(QUIET_S)
                ending.set()
            self.seconds = time.monotonic() - began
            await self.load.ask_again()
        finally:
            await self.load.clients.close()

    def _while_there_is_time(self, began: float) -> Iterator[Wave]:
        end = began + 60.0 * self._settings.minutes
        of_seed = waves(self._settings.seed, LAYOUT)
        yield next(of_seed)
        yield from takewhile(lambda wave: time.monotonic() < end and not self.unmended, of_seed)

    async def read_tiers(self) -> None:
        """Note what ranks have read from their tiers, which is forgotten when they end."""
        with contextlib.suppress(OSError):  # One is gone, which counts elsewhere.
            self.read_tokens |= await self._processes.ranks.read_from_tiers()

    async def _play(self, wave: Wave) -> None:
        processes, began = self._processes, self._processes.clock()
        async with asyncio.TaskGroup() as faults:
            for fault in wave.faults:
                await asyncio.sleep(max(0.0, began + fault.at_s - processes.clock()))
                faults.create_task(processes.play(fault))
        over = processes.clock()
        self.unmended += await processes.until_whole(MENDED_S)
        self.waves.append(Span(began, processes.clock()))
        await self.read_tiers()
        ended = len(self.load.answers)
        lost = sum(answer.ended is Ended.LOST for answer in self.load.answers)
        self._say(
            f"{processes.clock():6.1f} s: wave {len(self.waves)}, {len(wave.faults)} faults, mended "
            f"{processes.clock() - over:.1f} s after the last; {ended} answers so far, {lost} lost"
        )


async def _ranks_that_hold(processes: Processes) -> dict[str, str]:
    """Nobody asks for anything any more: what ranks hold all the same, in words."""
    with contextlib.suppress(TimeoutError):
        await processes.ranks.let_go()
    return await processes.ranks.unbalanced()


def judge(answers: list[Answer], oracle: Oracle | FakeOracle) -> list[Judged]:
    checks = {answer.asked.number: _check(answer, oracle) for answer in answers}
    first = {answer.asked.number: answer for answer in answers}
    return [_judged(answer, checks, first) for answer in answers]


def _check(answer: Answer, oracle: Oracle | FakeOracle) -> Checked:
    asked = answer.asked
    return oracle.check(asked.prompt_ids, answer.tokens, asked.temperature, asked.seed)


def _judged(answer: Answer, checks: dict[int, Checked], first: dict[int, Answer]) -> Judged:
    own, again = checks[answer.asked.number], answer.asked.again
    near_ties = own.near_ties if again is None else own.near_ties | checks[again].near_ties
    wrong = wrong_of(answer, own.wrong_at, None if again is None else first[again], near_ties)
    return Judged(answer, len(own.near_ties), wrong)
