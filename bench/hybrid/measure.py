"""Two pairs of ranks on the same requests, in turns: hits by attention alone, and by the least of all groups.

The least of all groups on a model whose states come by wire is none: a rank has no state for a prefix that it
did not compute, so decode hits are 0. That side is one without decode cache, as vLLM was with hybrids (vllm
42524). Its requests are charged one state or tail each; ours all that the pools set aside for them.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from bench.decode_cache import workload as workloads
from bench.decode_cache.load import Run, drive
from bench.decode_cache.ranks import DecodeSide, RankSettings, open_side
from bench.decode_cache.workload import Workload
from bench.hybrid.memory import Division
from bench.hybrid.models import Model
from services.values.kv import KvLayout
from services.values.rank import Plan

LEAST, PER_GROUP = "least of all groups", "per group"


@dataclass(frozen=True, slots=True)
class Case:
    """A model with a workload, and the decode rank's memory on each side."""

    model: Model
    make: Callable[[int], Workload]
    least: Division
    per_group: Division

    @property
    def has_one_turn(self) -> bool:
        return all(len(c.questions) == 1 for c in self.make(0).conversations)


@dataclass(frozen=True, slots=True)
class Measured:
    case: Case
    layout: KvLayout
    runs: dict[str, list[Run]]


async def measure(case: Case, settings: RankSettings, rounds: int, seed: int, *, quick: bool) -> Measured:
    """The decode rank's pools are the case's, not those of `settings`."""
    runs: dict[str, list[Run]] = {LEAST: [], PER_GROUP: []}
    async with AsyncExitStack() as stack:
        sides: dict[str, DecodeSide] = {}
        for name, division in ((LEAST, case.least), (PER_GROUP, case.per_group)):
            of_side = _divided(settings, division, case.model)
            sides[name] = await stack.enter_async_context(open_side(of_side, decode_cache=name == PER_GROUP))
        for side in sides.values():
            for plan in Plan:
                await drive(side, workloads.warm_up(seed, plan, quick), seed)
        for round_ in range(rounds):
            workload = case.make(seed + round_)
            for name in runs if round_ % 2 == 0 else reversed(runs):
                run = await drive(sides[name], workloads.renamed(workload, f"@{round_}"), seed + round_)
                runs[name].append(run)
        return Measured(case, sides[PER_GROUP].layout, runs)


def _divided(settings: RankSettings, division: Division, model: Model) -> RankSettings:
    return replace(
        settings,
        fake_carried=model.fake_carried,
        decode_pages=division.num_pages,
        decode_slots=division.num_slots,
        decode_window_pages=division.num_window_pages,
    )
