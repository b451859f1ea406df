"""The last minutes' requests are replayed on more and fewer ranks, to tell how many of each role are enough.

    requests and speeds -> replay on (prefill, decode) -> TTFT, ITL, goodput -> the least that meet the goals

Every number of ranks gets the same requests at the same times, and what each took of its own, so that two
replays differ by their ranks alone. What ranks held before the first request is put there first, as the
requests found it. A prompt of a conversation is sent as long after the last answer as it was in truth.

A p99 is decided by a few long prompts, and what they wait by the router that each comes to, and by ties. So
each number of ranks is replayed up to three times, drawn otherwise; by who asks again soon, once.

An answer comes within seconds: about 800 requests are replayed at most, copies for more load included, in
blocks so large that a prompt has some dozen, and of the numbers of ranks only those near the least.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add

from services.router.replay.load import ReplayedLoad
from services.router.replay.observed import Fleet, Observation, Observed
from services.router.replay.ranks import DecodeRank, PrefillRank, Rank
from services.router.replay.replay import Replay
from services.router.replay.setting import Setting
from services.router.replay.speeds import FittedSpeeds, speeds_of
from services.router.replay.workload import Job
from services.values.rank import Plan

MOST_REQUESTS = 800
FEW_REQUESTS = 50
_MOST_REPLAYED, _MOST_DRAWS = 1_600, 3
_UNCOUNTED_SHARE = 0.1  # The queues of the first ones are shorter than they were.
_BUSY = 0.85  # Ranks that compute more of the time have queues that grow, or soon will.
_CLEARLY = 0.9  # A TTFT below this part of another is a lower one.
_IDLE, _NOTICEABLE = 0.4, 0.005
MOST_RANKS = 256
_STEP = 2  # So many prefill ranks more or less, at the same number of all, are a step.
_MOST_ROUTERS = 2  # Each follows all ranks, in a replay too; what a third one changes is little.
_FAR = 2.0  # A load, or ranks, so many times the present ones are far from what was measured.


@dataclass(frozen=True, slots=True)
class Goals:
    """`share` of the requests must have their first token and the mean time between tokens within these."""

    ttft_s: float
    itl_s: float
    share: float = 0.95

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.itl_s > 0 and 0 < self.share < 1):
            raise ValueError(f"goals are above 0, and a share is below 1: {self}")


@dataclass(frozen=True, slots=True, order=True)
class Size:
    prefill: int
    decode: int

    @property
    def ranks(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}+{self.decode}" if self.prefill else f"{self.decode}"


@dataclass(frozen=True, slots=True)
class Outlook:
    """So many ranks would give this."""

    size: Size
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    goodput: float  # the share of the requests within the goals
    reused: float  # the share of the prompts' tokens
    prefill_busy: float  # the share of the time in which they compute prompts
    decode_busy: float  # likewise
    meets: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """`least` is None where no number of ranks that was tried meets the goals. `together` are as many ranks
    that all do both, or the fewest of these that meet the goals."""

    observation: Observation
    goals: Goals
    load: float
    speeds: FittedSpeeds
    present: Outlook
    least: Outlook | None
    together: Outlook | None
    tried: Sequence[Outlook]
    warnings: Sequence[str]

    @property
    def split_loses(self) -> str:
        """Return why prefill and decode apart lose, or "" where they do not, or nothing is known of it."""
        least, together = self.least, self.together
        if together is None or least is None or not least.size.prefill or not together.meets:
            return ""
        lose, ranks = "prefill and decode apart lose here", together.size.ranks
        if ranks < least.size.ranks:
            enough = "1 rank that does both meets" if ranks == 1 else f"{ranks} ranks that do both meet"
            return f"{lose}: {enough} the goals, apart it takes {least.size.ranks}"
        if together.ttft_p99_s < _CLEARLY * least.ttft_p99_s:
            times = least.ttft_p99_s / together.ttft_p99_s
            return f"{lose}: of as many ranks that do both the TTFT p99 is {times:.1f} times lower"
        return ""


def advise(
    observation: Observation, goals: Goals, load: float = 1.0, seed: int = 1, in_steps: bool = False
) -> Advice:
    """Return the least ranks that meet the goals under so many times the observed load, and what as many that
    do both would give. Who plans `in_steps` asks again soon: few ranks change their role at a time, and
    nothing is tried beside that.

    Raises ValueError where nothing was observed.
    """
    observation = _latest(observation)
    if not observation.requests or not observation.fleet.decode:
        raise ValueError("there are no requests, or no decode ranks, to plan from")
    trial = Trial(observation, goals, load * _others(observation), seed, from_now=in_steps)
    fleet = observation.fleet
    present = trial.of(Size(fleet.prefill if Plan.REMOTE in fleet.plans else 0, fleet.decode))
    least = _least(trial, present.size, _STEP if in_steps else MOST_RANKS)
    together = None
    if not in_steps and Plan.LOCAL in fleet.plans and least is not None and least.size.prefill:
        together = _least_together(trial, least.size.ranks)
    return Advice(
        observation,
        goals,
        load,
        trial.speeds,
        present,
        least,
        together,
        [trial.tried[size] for size in sorted(trial.tried)],
        list(_warnings(observation, trial.speeds, load, present, least)),
    )


def _others(observation: Observation) -> float:
    """Return how many times the load of these routers that of all is."""
    return max(1.0, observation.fleet.routers / observation.routers)


def _latest(observation: Observation) -> Observation:
    """Return the observation with its last requests alone, where there are many."""
    requests = sorted(observation.requests, key=lambda seen: seen.arrival_s)
    return replace(observation, requests=requests[-MOST_REQUESTS:])


def _within_window(observation: Observation) -> Observation:
    """Return it with what came before the window as if it had come when that began: those few still wait or
    run, and the rest of their time is not that of a load."""
    since_s = observation.requests[-1].arrival_s - observation.fleet.window_s
    requests = [
        seen if seen.is_over and seen.ttft_s else replace(seen, arrival_s=max(seen.arrival_s, since_s))
        for seen in observation.requests
    ]
    return replace(observation, requests=requests)


def _warnings(
    observation: Observation, speeds: FittedSpeeds, load: float, present: Outlook, least: Outlook | None
) -> Iterator[str]:
    requests, fleet = observation.requests, observation.fleet
    if len(requests) < FEW_REQUESTS:
        yield f"only {len(requests)} requests were seen: a p99 of so few is their longest"
    if not {"prefill", "decode"} & speeds.measured:
        yield "no speed of prompts was measured: too few were computed"
    if "steps" not in speeds.measured:
        yield "no time of steps was measured: too few answers are long enough"
    if fleet.carried_bytes:
        yield "ranks are taken to go on wherever they hold a prompt, not at their checkpoints alone"
    if load >= _FAR:
        yield f"{load:g} times the load is far from what was seen"
    if least is not None and not 1 / _FAR <= least.size.ranks / present.size.ranks <= _FAR:
        yield f"{least.size} ranks are far from the present {present.size}: go there in steps"
    measured, predicted = _measured_p50_s(requests), present.ttft_p50_s
    if load == 1 and measured and not 0.75 <= predicted / measured <= 1.25:
        yield (
            f"the present ranks' TTFT p50 is predicted as {predicted:.3g} s, and was {measured:.3g} s: "
            "something that is not modelled decides"
        )


def _measured_p50_s(requests: Sequence[Observed]) -> float:
    known = sorted(seen.ttft_s for seen in requests if seen.ttft_s)
    return quantile(known, 0.5) if known else 0.0


class Trial:
    """Replays of one load, kept by the number of ranks."""

    def __init__(
        self, observation: Observation, goals: Goals, load: float, seed: int, from_now: bool = False
    ) -> None:
        self.fleet = observation.fleet
        self.speeds = speeds_of(observation.fleet, observation.requests, _others(observation))
        self.tried: dict[Size, Outlook] = {}
        self._goals = goals
        # More load is copies of fewer requests, as every size would take so many times longer otherwise.
        last = max(FEW_REQUESTS, int(MOST_REQUESTS / max(1.0, load)))
        self._beyond_s = self.speeds.beyond_s[-last:]
        found = ReplayedLoad(_within_window(replace(observation, requests=observation.requests[-last:])))
        self._block_tokens = found.block_tokens
        self._span_s = found.span_s
        self.workload = found.times(load, seed, from_now)
        # Pools are the mean of ranks that may differ, and the largest request found room in one.
        pages = (request.num_pages(self._block_tokens) for request in self.workload.requests)
        answers = (-(-request.output_tokens // self._block_tokens) for request in self.workload.requests)
        self._least_blocks = max(map(add, pages, answers))
        draws = min(_MOST_DRAWS, _MOST_REPLAYED // len(self.workload.requests))
        self._draws = 1 if from_now else max(1, draws)

    def of(self, size: Size) -> Outlook:
        if size not in self.tried:
            self.tried[size] = self._replayed(size)
        return self.tried[size]

    def _replayed(self, size: Size) -> Outlook:
        return self._outlook(size, [self._replay(size, draw) for draw in range(self._draws)])

    def _replay(self, size: Size, draw: int) -> Replay:
        fleet, block_tokens = self.fleet, self._block_tokens
        setting = Setting(
            size.prefill,
            size.decode,
            blocks=max(self._least_blocks, fleet.decode_pool_tokens // block_tokens),
            prefill_blocks=max(self._least_blocks, fleet.prefill_pool_tokens // block_tokens),
            timing=replace(self.speeds.decode, block_tokens=block_tokens),
            prefill_timing=replace(self.speeds.prefill, block_tokens=block_tokens),
            routers=max(1, min(_MOST_ROUTERS, fleet.routers)),
            draw=draw,
        )
        # A plan does not count on pulls, which not every engine has.
        is_local = Plan.LOCAL in fleet.plans or not size.prefill
        policy = "ours-alone" if is_local else "ours-remote-alone"
        replay = Replay(setting, policy, [*self.workload.warm, *self.workload.requests])
        replay.serve()
        return replay

    def _outlook(self, size: Size, replays: Sequence[Replay]) -> Outlook:
        workload, goals = self.workload, self._goals
        all_jobs = [job for replay in replays for job in replay.jobs]
        num_warm, num_requests = len(workload.warm), len(workload.requests)
        first = num_warm + workload.waiting + int(_UNCOUNTED_SHARE * (num_requests - workload.waiting))
        beyond_s = [self._beyond_s[index] for index in workload.sources]
        jobs = [job for job in all_jobs if job.request.number >= first]
        ttft = [max(0.0, job_ttft_s(job) + beyond_s[job.request.number - num_warm]) for job in jobs]
        itl = [job_itl_s(job) for job in jobs]
        good = sum(a <= goals.ttft_s and b <= goals.itl_s for a, b in zip(ttft, itl, strict=True)) / len(jobs)
        served = [job for job in all_jobs if job.request.number >= num_warm + workload.waiting]
        busy = _busy(served, size, len(replays) * self._span_s)
        ttft, itl = sorted(ttft), sorted(itl)
        prompt_tokens = sum(job.request.prompt_tokens for job in jobs)
        return Outlook(
            size,
            quantile(ttft, 0.5),
            quantile(ttft, 0.99),
            quantile(itl, 0.5),
            quantile(itl, 0.99),
            good,
            1 - sum(job.computed_tokens for job in jobs) / prompt_tokens,
            busy[PrefillRank],
            busy[DecodeRank],
            good >= goals.share and max(busy.values()) < _BUSY,
        )


def _busy(jobs: Sequence[Job], size: Size, span_s: float) -> dict[type[Rank], float]:
    """Return the share of the time in which prompts came that each role's ranks compute them, in the mean.
    Near 1 queues grow, though a goal of many seconds may not show it in some minutes. It is the time in which
    they came in truth: where ranks are too few, conversations go on later, and it takes longer."""
    seconds = defaultdict[type[Rank], float](float)
    for job in jobs:
        rank = job.prefill or job.decode
        chunks = -(-job.computed_tokens // rank.timing.chunk_tokens)
        seconds[type(rank)] += job.computed_tokens / rank.timing.tokens_per_s
        seconds[type(rank)] += chunks * rank.timing.chunk_step_s
    numbers: dict[type[Rank], int] = {PrefillRank: size.prefill, DecodeRank: size.decode}
    return {role: seconds[role] / span_s / max(1, number) for role, number in numbers.items()}


def job_ttft_s(job: Job) -> float:
    return job.first_token_s - job.request.arrival_s


def job_itl_s(job: Job) -> float:
    return (job.ended_s - job.first_token_s) / max(1, job.request.output_tokens - 1)


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- the search -----------------------------------------------------------------------------------


def _least(trial: Trial, present: Size, reach: int) -> Outlook | None:
    """Return the least ranks in all that meet the goals, the best split of them.

    More ranks meet what fewer do, up to the noise of a replay: so the number is doubled or halved until it
    is bracketed, and then bisected.
    """
    share, floor = present.prefill / present.ranks, 2 if present.prefill else 1

    def best(ranks: int) -> Outlook:
        nonlocal share
        found = _best_split(trial, ranks, share, reach)
        share = found.size.prefill / ranks
        return found

    ranks = present.ranks
    found = best(ranks)
    if found.meets:
        enough, fails = found, 0
        while ranks > floor and not fails:
            ranks = max(floor, min(ranks - 1, ranks * 3 // 4))
            found = best(ranks)
            enough, fails = (found, 0) if found.meets else (enough, ranks)
    else:
        while not found.meets:
            before, fails, ranks = found, ranks, min(MOST_RANKS, max(ranks + 1, ranks * 3 // 2))
            found = best(ranks)
            if not found.meets and (ranks == MOST_RANKS or _is_in_vain(before, found)):
                return None
        enough = found
    while fails and enough.size.ranks - fails > 1:
        ranks = (enough.size.ranks + fails) // 2
        found = best(ranks)
        enough, fails = (found, fails) if found.meets else (enough, ranks)
    return enough


def _is_in_vain(before: Outlook, found: Outlook) -> bool:
    """Return whether more ranks that are mostly idle have not helped: what is missed is not a queue's."""
    is_idle = max(found.prefill_busy, found.decode_busy) < _IDLE
    return is_idle and found.goodput - before.goodput < _NOTICEABLE


def _best_split(trial: Trial, ranks: int, share: float, reach: int) -> Outlook:
    """Return the split at this share of prefill ranks if it meets the goals, else climb to one within reach
    that does, or whose neighbours are no better."""
    least, most = _prefill_bounds(trial.fleet, ranks)
    at = min(most, max(least, round(share * ranks)))
    least, most = max(least, at - reach), min(most, at + reach)
    best = first = trial.of(Size(at, ranks - at))
    for step in (1, -1):
        while not best.meets and least <= best.size.prefill + step <= most:
            other = trial.of(Size(best.size.prefill + step, best.size.decode - step))
            if _worth(other) <= _worth(best):
                break
            best = other
        if best is not first:
            break
    return best


def _worth(outlook: Outlook) -> tuple[bool, float, float]:
    return outlook.meets, round(outlook.goodput, 2), -outlook.ttft_p99_s


def _prefill_bounds(fleet: Fleet, ranks: int) -> tuple[int, int]:
    """Return the fewest and the most prefill ranks of so many: a cluster whose ranks are apart stays so."""
    if Plan.REMOTE not in fleet.plans or not fleet.prefill or ranks < 2:
        return 0, 0
    return 1, ranks - 1


def _least_together(trial: Trial, ranks: int) -> Outlook:
    """Return the fewest ranks of at most so many that do both and meet the goals, or as many."""
    found = trial.of(Size(0, ranks))
    while found.meets and found.size.ranks > 1:
        fewer = trial.of(Size(0, found.size.ranks - 1))
        if not fewer.meets:
            break
        found = fewer
    return found
