"""A fleet that follows `isthmus plan` beside one that knew the future, in virtual time.

The load swings between its least and four times that, as a sine, once for each seed: conversations of two or
three turns that begin at random. Each minute the loop plans from what was seen in the last minutes and from
what still waits, as a router does (services/router/replay/following.py). A new rank is empty, takes its time
to start, and counts from then on; one that goes takes nothing new, and counts until all it had has ended.
Nothing that it cached is handed over, which is worse than the truth.

The one that knew the future plans from what waits and from the requests that come in the next minutes, with
their true lengths. It plans for somewhat less than their load or for all of it, whichever takes the fewest
rank-hours for the goodput that is wanted.

A request is good if its first token and the mean time between its tokens are within the goals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from bench.report import Row, number, verdict
from services.kv.block_hash import scope_seed, sequence_hashes
from services.router.replay.following import PlannerJob as PlanJob
from services.router.replay.following import Steady, plan
from services.router.replay.observed import Fleet, Observation, Observed
from services.router.replay.ours import Ours, _registration
from services.router.replay.planner import Goals, Size, job_itl_s, job_ttft_s
from services.router.replay.ranks import MODEL, Rank
from services.router.replay.replay import Replay
from services.router.replay.setting import Setting, Timing
from services.router.replay.workload import Job, TraceRequest
from services.values.rank import Plan, Role
from services.values.rank_reports import Registration

BLOCK, POOL_BLOCKS = 256, 800
TIMING = Timing(
    block_tokens=BLOCK,
    tokens_per_s=300.0,
    chunk_tokens=1_024,
    kv_bytes_per_token=131_072,
    step_s=0.14,
    step_s_per_sequence=0.006,
)
GOALS = Goals(ttft_s=30.0, itl_s=0.8)
SWINGS, PERIOD_S, LEAST_PER_S, TIMES = 1, 2_400.0, 0.1, 4.0
_MOST = 120  # of each role: those that went are not taken back
_FIRST = Size(3, 2)
_SEED = scope_seed(MODEL)


@dataclass(frozen=True, slots=True)
class Loop:
    every_s: float = 60.0
    window_s: float = 180.0
    start_s: float = 30.0
    down_s: float = 180.0
    headroom: float = 1.1  # as a router's --plan-headroom


def conversations_per_s(at_s: float) -> float:
    """Return the rate, which begins at its least."""
    swing = (1 - math.cos(2 * math.pi * at_s / PERIOD_S)) / 2
    return LEAST_PER_S * (1 + (TIMES - 1) * swing)


def requests(seed: int = 1) -> list[TraceRequest]:
    random, found, at_s, ids = Random(seed), list[TraceRequest](), 0.0, 1_000
    most_per_s = LEAST_PER_S * TIMES
    while (at_s := at_s + random.expovariate(most_per_s)) < SWINGS * PERIOD_S:
        if random.random() * most_per_s > conversations_per_s(at_s):
            continue
        tokens, blocks, after = 4 * BLOCK, list(range(4)), tuple[int, ...]()
        session = f"s{len(found)}"
        for turn in range(random.randint(2, 3)):
            new = int(min(8_000, max(100, random.lognormvariate(math.log(1_500), 0.6))))
            output, tokens = random.randint(60, 240), tokens + new
            while len(blocks) < tokens // BLOCK:
                blocks.append(ids := ids + 1)
            prompt, prompt_tokens = tuple(blocks), tokens
            tokens += output
            while len(blocks) < (tokens - 1) // BLOCK:
                blocks.append(ids := ids + 1)
            wait_s = random.uniform(5.0, 30.0) if turn else 0.0
            request = TraceRequest(len(found), at_s, prompt, prompt_tokens, output, session, after, wait_s)
            found.append(replace(request, answered=tuple(blocks)))
            after = (request.number,)
    return found


def observed(job: Job, now: float) -> Observed:
    """Return a request as a router would have recorded it by now."""
    request, is_remote = job.request, job.prefill is not None
    blocks, conversation = sequence_hashes(request.blocks, 1, _SEED), 1 + int(request.session[1:])
    if not job.first_token_s:
        tokens, times = (request.prompt_tokens, 0, 0, 0, 0), (0.0, now - request.arrival_s, 0.0, 0.0, 0.0)
        return Observed(request.arrival_s, *tokens, *times, is_remote, False, conversation, blocks)
    ended_s = job.ended_s or now
    ttft_s = job.first_token_s - request.arrival_s
    output = request.output_tokens if job.ended_s else max(1, int((now - job.first_token_s) / TIMING.step_s))
    return Observed(
        request.arrival_s,
        request.prompt_tokens,
        min(request.output_tokens, output),
        job.computed_tokens,
        request.prompt_tokens - job.computed_tokens,
        job.delta_tokens,
        ttft_s,
        ended_s - request.arrival_s,
        job.decode_queue_s + job.prefill_queue_s,
        job.computed_s - job.began_s,
        job.transfer_s,
        is_remote,
        bool(job.ended_s),
        conversation,
        blocks,
    )


def fleet(size: Size, window_s: float) -> Fleet:
    pool = POOL_BLOCKS * BLOCK
    bytes_per_token = float(TIMING.kv_bytes_per_token)
    return Fleet(
        MODEL,
        *(size.prefill, size.decode, 1, BLOCK, TIMING.chunk_tokens, pool, pool, bytes_per_token, 0),
        *(frozenset(Plan), window_s),
    )


class Scaled(Replay):
    """A replay whose ranks come and go."""

    def __init__(self, asked: Sequence[TraceRequest], first: Size) -> None:
        setting = Setting(_MOST, _MOST, blocks=POOL_BLOCKS, timing=TIMING)
        super().__init__(setting, "ours", asked)
        (ours,) = self._policies
        assert isinstance(ours, Ours)
        self._ours = ours
        self._sides: tuple[_Side, _Side] = (_Side(self._prefills), _Side(self._decodes))
        self.history: list[tuple[float, Size]] = []
        self.resize(first, 0.0)

    @property
    def now(self) -> float:
        return self._events.now

    @property
    def size(self) -> Size:
        prefill, decode = (len(side.up) + side.starting for side in self._sides)
        return Size(prefill, decode)

    def every(self, seconds: float, until_s: float, action: Callable[[], None]) -> None:
        at_s = seconds
        while at_s < until_s:
            self._events.at(at_s, action)
            at_s += seconds

    def resize(self, size: Size, start_s: float) -> None:
        self.history.append((self.now, size))
        for side, wanted in zip(self._sides, (size.prefill, size.decode), strict=True):
            more = wanted - len(side.up) - side.starting
            if more > 0:
                side.starting += more
                self._events.after(start_s, self._started, side, more)
            while len(side.up) + side.starting > max(1, wanted) and len(side.up) > 1:
                side.leaving.append(side.up.pop())
        self._tell()

    def _started(self, side: "_Side", number: int) -> None:
        side.starting -= number
        for _ in range(number):
            side.up.append(side.ranks[side.next])
            side.next += 1
        self._tell()

    def _tell(self) -> None:
        prefills, decodes = self._sides
        self._ours._placer.set_ranks(
            [_registered(rank, Role.DECODE, rank in decodes.leaving) for rank in decodes.known()],
            [_registered(rank, Role.PREFILL, rank in prefills.leaving) for rank in prefills.known()],
        )

    def count(self) -> None:
        """Let those go that have nothing left, and note how many there are."""
        for side in self._sides:
            side.leaving = [rank for rank in side.leaving if rank.cache.num_open or rank.pending_tokens]
            side.counted += len(side.up) + side.starting + len(side.leaving)
        self._tell()


class _Side:
    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks, self.next, self.starting, self.counted = ranks, 0, 0, 0
        self.up: list[Rank] = []
        self.leaving: list[Rank] = []

    def known(self) -> Sequence[Rank]:
        return (*self.up, *self.leaving)


def _registered(rank: Rank, role: Role, draining: bool) -> Registration:
    return replace(_registration(rank, role, TIMING, True), draining=draining)


def run(
    asked: Sequence[TraceRequest], loop: Loop, follow: Callable[[Scaled], Size] | None, name: str
) -> tuple[Row, Scaled]:
    """Let the fleet be resized by `follow`, which is asked again and again; with None it stays large."""
    scaled = Scaled(asked, _FIRST if follow is not None else Size(14, 8))
    until_s = SWINGS * PERIOD_S

    def look() -> None:
        assert follow is not None
        scaled.resize(follow(scaled), loop.start_s)

    if follow is not None:
        scaled.every(loop.every_s, until_s, look)
    step_s = 1.0
    scaled.every(step_s, until_s, scaled.count)
    scaled.serve()
    good = [job_ttft_s(job) <= GOALS.ttft_s and job_itl_s(job) <= GOALS.itl_s for job in scaled.jobs]
    ttft = sorted(map(job_ttft_s, scaled.jobs))
    hours = [side.counted * step_s / 3600 for side in scaled._sides]
    sizes = [size.ranks for _, size in scaled.history]
    return {
        "who": name,
        "requests": len(good),
        "goodput": sum(good) / len(good),
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[int(0.99 * len(ttft))],
        "prefill_hours": hours[0],
        "decode_hours": hours[1],
        "rank_hours": sum(hours),
        "least_ranks": min(sizes),
        "most_ranks": max(sizes),
        "changes": sum(a != b for (_, a), (_, b) in zip(scaled.history, scaled.history[1:], strict=False)),
    }, scaled


def seen_of(scaled: Scaled, since_s: float) -> list[Observed]:
    """Return those that came since then, and those that run, as a router does."""
    jobs = (job for job in scaled.jobs if job.request.arrival_s >= since_s or not job.ended_s)
    return [observed(job, scaled.now) for job in jobs]


def follower(loop: Loop, told: Callable[[str], None]) -> Callable[[Scaled], Size]:
    steady = Steady(loop.down_s)

    def follow(scaled: Scaled) -> Size:
        seen = seen_of(scaled, scaled.now - loop.window_s)
        if not seen:
            return scaled.size
        observation = Observation(fleet(scaled.size, loop.window_s), seen)
        made = plan(PlanJob(observation, GOALS, loop.headroom))
        wanted = steady.wanted(scaled.now, (made.wanted or made.present).size, scaled.size)
        told(f"{scaled.now:6.0f} s: {len(seen)} requests, {scaled.size} -> {wanted}")
        return wanted

    return follow


def foreseen(reference: Scaled, loop: Loop, headroom: float) -> Callable[[Scaled], Size]:
    """Return what plans from those that wait and those that are to come, as they came in a run that had
    ranks enough."""
    steady = Steady(loop.down_s)
    jobs = sorted(reference.jobs, key=lambda job: job.request.arrival_s)

    def follow(scaled: Scaled) -> Size:
        until_s = scaled.now + loop.window_s
        known = [observed(job, math.inf) for job in jobs if scaled.now <= job.request.arrival_s < until_s]
        waiting = [seen for seen in seen_of(scaled, scaled.now) if not seen.ttft_s]
        if not known:
            return scaled.size
        observation = Observation(fleet(scaled.size, loop.window_s), [*waiting, *known])
        made = plan(PlanJob(observation, GOALS, headroom))
        return steady.wanted(scaled.now, (made.wanted or made.present).size, scaled.size)

    return follow


def measure(loop: Loop, headrooms: Sequence[float], seeds: Sequence[int]) -> tuple[list[Row], list[Row]]:
    """Return a row of each run, and the goals of each seed."""
    rows, goals = list[Row](), list[Row]()
    for seed in seeds:
        asked = requests(seed)
        ours, _ = run(asked, loop, follower(loop, partial(print, flush=True)), "follows isthmus plan")
        many, reference = run(asked, loop, None, "has ranks enough")
        foreseeing = [
            run(asked, loop, foreseen(reference, loop, headroom), f"knew the future, for {headroom:g} of it")[
                0
            ]
            for headroom in headrooms
        ]
        rows += [{"seed": seed} | row for row in (ours, *foreseeing, many)]
        enough = [number(row["rank_hours"]) for row in foreseeing if number(row["goodput"]) >= GOALS.share]
        times = number(ours["rank_hours"]) / min(enough) if enough else None
        found = verdict("goodput of the loop", ">=", GOALS.share, ours["goodput"])
        beside = verdict("rank-hours / those of who knew the future", "<=", 1.15, times)
        goals += [{"at": f"closed loop, seed {seed}"} | each for each in (found, beside)]
    return rows, goals
