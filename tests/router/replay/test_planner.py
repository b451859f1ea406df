"""A router remembers its requests, learns speeds from them, and tells how many ranks are enough."""

from bisect import bisect
from dataclasses import replace
from itertools import chain
from random import Random

import pytest

from services.engine.paged import admitting
from services.router.replay import planner, ranks
from services.router.replay.events import Events
from services.router.replay.load import ReplayedLoad
from services.router.replay.observed import (
    Fleet,
    Observation,
    Observed,
    Recorder,
    anonymous,
    merged,
    packed,
    unpacked,
)
from services.router.replay.planner import Goals, Size, Trial, _others, advise, job_ttft_s, quantile
from services.router.replay.replay import Replay
from services.router.replay.setting import Timing
from services.router.replay.speeds import _Overlap, fitted, speeds_of
from services.router.replay.workload import BLOCK_TOKENS, Job, TraceRequest
from services.values.rank import Generation, Plan, RankId

BLOCK, CHUNK_S, TOKEN_S, STEP_S, SEQUENCE_S = 64, 0.02, 0.0005, 0.01, 0.001
FLEET = Fleet("m", 2, 2, 1, BLOCK, 512, 100_000, 100_000, 1_000.0, 0, frozenset(Plan), 600.0)


def observed(at_s: float, blocks: range, computed: int, output: int = 20, **more: object) -> Observed:
    """Return a request as one rank of each role would serve it alone."""
    prompt = BLOCK * len(blocks) + 7
    compute_s = CHUNK_S * -(-computed // 512) + TOKEN_S * computed
    ttft_s = compute_s + 0.0115
    itl_s = STEP_S + SEQUENCE_S
    seen = Observed(
        *(at_s, prompt, output, computed, prompt - computed, computed, ttft_s),
        *(ttft_s + (output - 1) * itl_s, 0.0, compute_s, 0.001, True, True, 0, tuple(blocks)),
    )
    return replace(seen, **more)


def conversations(number: int, per_s: float, seed: int = 1) -> list[Observed]:
    """Each has two turns, which share four blocks with all others."""
    random, requests, at_s, first = Random(seed), [], 1_000.0, 100
    for conversation in range(1, number + 1):
        at_s += random.expovariate(per_s)
        blocks = [*range(4), *range(first, first + random.randint(2, 16))]
        longer = [*blocks, *range(first + 50, first + 54)]
        first += 100
        turn = observed(at_s, blocks, BLOCK * (len(blocks) - 4) + 7, conversation=conversation)
        requests += [turn, observed(turn.ended_s + 3.0, longer, 4 * BLOCK + 7, conversation=conversation)]
    return sorted(requests, key=lambda seen: seen.arrival_s)


def test_what_a_router_remembers(subtests):
    requests = conversations(40, 2.0)
    with subtests.test("a record is the request again, to the precision of a float"):
        for seen in requests:
            again = unpacked(packed(seen))
            assert again == replace(
                seen,
                ttft_s=again.ttft_s,
                duration_s=again.duration_s,
                compute_s=again.compute_s,
                transfer_s=again.transfer_s,
                blocks=again.blocks,
            )
            assert list(again.blocks) == list(seen.blocks)
            assert again.duration_s == pytest.approx(seen.duration_s)
    with subtests.test("it forgets what is older than the window, and the oldest beyond its bytes"):
        recorder = Recorder(10.0)
        for seen in sorted(requests, key=lambda seen: seen.ended_s):
            recorder.add(seen)
        now = requests[-1].ended_s
        kept = [seen.arrival_s for seen in recorder.recent(now, 1_000)]
        assert sorted(kept) == [seen.arrival_s for seen in requests if seen.arrival_s >= now - 10.0]
        assert recorder.recent(now + 20.0, 9) == [] and recorder.size_bytes == len(recorder) == 0
        small = Recorder(1e9, most_bytes=2_000)
        for seen in requests:
            small.add(seen)
        assert 0 < len(small) < len(requests) and small.size_bytes <= 2_000
        assert [each.arrival_s for each in small.recent(now, 2)] == [each.arrival_s for each in requests[-2:]]
    with subtests.test("names that leave a router tell what begins alike, and only to who drew the salt"):
        first, second = (list(anonymous(requests, salt, 2_000.0)) for salt in (5, 6))
        assert first == list(anonymous(requests, 5, 2_000.0))
        names = {name for seen in requests for name in seen.blocks}
        told = [{name for seen in each for name in seen.blocks} for each in (first, second)]
        assert len(told[0]) == len(names) and not told[0] & (told[1] | names)
        assert {seen.arrival_s for seen in first} == {seen.arrival_s - 2_000.0 for seen in requests}
        halves = [Observation(FLEET, first[::2]), Observation(replace(FLEET, routers=2), first[1::2])]
        together = merged(halves)
        assert list(together.requests) == sorted(first, key=lambda seen: seen.arrival_s)
        assert together.fleet.routers == together.routers == 2


def test_speeds(subtests):
    random = Random(3)
    with subtests.test("a line through points, some of which are something else's"):
        for a, b in ((0.02, 0.0005), (0.0, 0.001), (0.03, 0.0)):
            points = [(random.randint(1, 4), random.randint(1, 2_000)) for _ in range(60)]
            made = [(x, y, (a * x + b * y) * random.uniform(0.97, 1.03)) for x, y in points]
            made += [(1.0, 100.0, 9.0)] * 3
            found = fitted(made)
            assert found == pytest.approx((a, b), rel=0.1, abs=2e-3 if not b else 1e-3), (a, b)
        for seed in range(9):
            points = [(float(-(-y // 512)), float(y)) for y in (random.randint(1, 2_000) for _ in range(60))]
            for each, share in ((4, 0.3), (2, 0.1)):  # of which one waited
                waited = [random.expovariate(0.3) if n % each == 0 else 0.0 for n in range(60)]
                made = [(x, y, 0.02 * x + 0.0005 * y + w) for (x, y), w in zip(points, waited, strict=True)]
                shares = [share if w else 0.5 for w in waited]
                assert fitted(made, shares) == pytest.approx((0.02, 0.0005), rel=0.1), (seed, each)
    with subtests.test("overlapping intervals, counted one by one"):
        intervals = [(begin := random.uniform(0, 50), begin + random.uniform(0, 9)) for _ in range(40)]
        overlap = _Overlap(intervals)
        for _ in range(40):
            begin = random.uniform(-5, 60)
            end = begin + random.uniform(0, 20)
            expected = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in intervals)
            assert overlap.seconds(begin, end) == pytest.approx(expected)
    with subtests.test("those of a cluster are found again"):
        speeds = speeds_of(FLEET, conversations(60, 0.05))
        assert speeds.prefill.chunk_step_s == pytest.approx(CHUNK_S, rel=0.05)
        assert speeds.prefill.tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.05)
        assert speeds.decode.step_s + speeds.decode.step_s_per_sequence == pytest.approx(0.011, rel=0.05)
        assert speeds.measured == {"prefill", "steps", "transfer"}
        assert max(speeds.beyond_s) == pytest.approx(0.009)
    with subtests.test("so are they where each third prompt waits for one that is computed, with its pages"):
        busy = []
        for n, first in enumerate(conversations(60, 0.05)):
            first = replace(first, arrival_s=20.0 * n)
            busy.append(first)
            if n % 2:
                later = replace(conversations(60, 0.05)[n - 1], arrival_s=20.0 * n + 0.001)
                waits_s = first.arrival_s + first.ttft_s - first.transfer_s - later.arrival_s - 0.0105
                times = ("ttft_s", "duration_s", "compute_s")
                busy.append(replace(later, **{name: getattr(later, name) + waits_s for name in times}))
        speeds = speeds_of(FLEET, busy)
        assert speeds.prefill.chunk_step_s == pytest.approx(CHUNK_S, rel=0.05)
        assert speeds.prefill.tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.05)
        assert speeds.beyond_s == pytest.approx([0.009] * len(busy), abs=0.002)
    with subtests.test("the time of a step under the load of all, from what one of four routers saw"):
        made = [observed(random.uniform(0, 300), range(4), 0, 200, ttft_s=0.1) for _ in range(2_000)]
        began = sorted(seen.arrival_s for seen in made)
        for n, seen in enumerate(made):  # Each takes about 4 s, beside those of as long before and after it.
            beside = bisect(began, seen.arrival_s + 2) - bisect(began, seen.arrival_s - 2)
            step_s = STEP_S + SEQUENCE_S * beside / FLEET.decode
            made[n] = replace(seen, duration_s=0.1 + 199 * step_s)
        speeds = [speeds_of(FLEET, made[::n], float(n)).decode for n in (1, 4)]
        whole, quarter = (each.step_s + 13 * each.step_s_per_sequence for each in speeds)
        assert quarter == pytest.approx(whole, rel=0.15)
    with subtests.test("nothing is measured of a few requests"):
        few = speeds_of(replace(FLEET, tokens_per_s=5_000.0, step_s=0.03), conversations(2, 1.0))
        assert not few.measured
        assert (few.decode.tokens_per_s, few.decode.step_s) == pytest.approx((5_000.0, 0.03))
    with subtests.test("ranks whose engine computes in order are replayed so"):
        in_order = speeds_of(replace(FLEET, computes_in_order=True), conversations(2, 1.0))
        assert in_order.prefill.shorter_first == in_order.decode.shorter_first == 0.0
        assert few.prefill.shorter_first == few.decode.shorter_first == Timing().shorter_first


def test_a_load_that_is_larger(subtests):
    requests = conversations(30, 1.0)
    load = ReplayedLoad(Observation(FLEET, requests))
    with subtests.test("the load itself is what was seen"):
        same = load.times(1.0, 1)
        assert same.sources == list(range(len(requests))) and len(same.warm) == 1  # what all have in common
        first_s = same.requests[0].arrival_s
        for request, seen in zip(same.requests, requests, strict=True):
            assert request.arrival_s - first_s == pytest.approx(seen.arrival_s - requests[0].arrival_s)
            assert (request.prompt_tokens, len(request.blocks)) == (seen.prompt_tokens, len(seen.blocks))
        assert sum(bool(request.after) for request in same.requests) == 30
        for second in (request for request in same.requests if request.after):
            (number,) = second.after
            first = same.requests[number - len(same.warm)]
            assert second.wait_s == pytest.approx(3.0) and second.arrival_s > first.arrival_s
            assert first.blocks == first.answered == second.blocks[: len(first.blocks)]
    with subtests.test("twice the load has each conversation twice, with blocks of its own"):
        twice = load.times(2.0, 1)
        assert len(twice.requests) == 2 * len(requests)
        numbers = [request.number for request in (*twice.warm, *twice.requests)]
        assert numbers == list(range(len(numbers)))
        of_first = [twice.requests[i].blocks for i, source in enumerate(twice.sources) if source == 0]
        assert of_first[0][:4] == of_first[1][:4] and not {*of_first[0][4:]} & {*of_first[1][4:]}
        for request in twice.requests:
            assert all(twice.requests[n - len(twice.warm)].session == request.session for n in request.after)
    with subtests.test("less has some of them, whole"):
        half = load.times(0.5, 1)
        assert 0 < len(half.requests) < len(requests) and len(half.requests) % 2 == 0
    with subtests.test("who wait now are first, all at once, and what they leave is no other one's"):
        late = [
            replace(seen, ttft_s=0.0, is_over=False) if n >= 55 else seen for n, seen in enumerate(requests)
        ]
        now = ReplayedLoad(Observation(FLEET, late)).times(1.0, 1, from_now=True)
        assert now.waiting == 5 and now.sources == [*range(55, 60), *range(60)]
        waiting, known = now.requests[:5], {block for request in now.requests[5:] for block in request.blocks}
        for request in waiting:
            assert request.arrival_s == now.requests[5].arrival_s and not request.after
            assert {*request.blocks} & known == {*request.blocks[:4]}


def test_how_many_ranks_are_enough(subtests, monkeypatch):
    goals = Goals(ttft_s=1.2, itl_s=0.1)
    seen = Observation(FLEET, conversations(30, 1.0))
    advice = advise(seen, goals)
    with subtests.test("fewer than the present ones, which the replay serves as they were served"):
        assert advice.least is not None and advice.least.size == Size(1, 1)
        assert advice.present.size == Size(2, 2) and advice.present.meets
        measured = sorted(each.ttft_s for each in seen.requests)
        assert advice.present.ttft_p50_s == pytest.approx(measured[len(measured) // 2], rel=0.15)
        assert not advice.warnings
    with subtests.test("the same requests give the same answer"):
        few = Observation(FLEET, conversations(10, 1.0))
        assert advise(few, goals).tried == advise(few, goals).tried
    with subtests.test("more under more load, and the planner says that it is far"):
        more = advise(seen, goals, load=2.0)
        assert more.least is not None and more.least.size.ranks > 2
        assert any("far from what was seen" in warning for warning in more.warnings)
    with subtests.test("routers that were not asked are taken to send as much"):
        of_four = replace(seen, fleet=replace(FLEET, routers=4))
        assert [_others(replace(of_four, routers=asked)) for asked in (1, 2, 4, 5)] == [4.0, 2.0, 1.0, 1.0]
    with subtests.test("a p99 is that of three replays, which differ by ties and who asked which router"):
        replays: list[Replay] = []

        class Kept(Replay):
            def serve(self) -> None:
                super().serve()
                replays.append(self)

        monkeypatch.setattr(planner, "Replay", Kept)
        of_two = Observation(replace(FLEET, routers=2), conversations(60, 4.0), 2)
        trial = Trial(of_two, goals, 1.0, 1)
        outlook, first = trial.of(Size(1, 1)), 12 + len(trial.workload.warm)
        each = [[job for job in one.jobs if job.request.number >= first] for one in replays]
        own = [sorted(map(job_ttft_s, jobs)) for jobs in each]
        assert len(each) == 3 and len({tuple(ttft) for ttft in own}) == 3
        most_beyond_s = max(trial.speeds.beyond_s)
        assert outlook.ttft_p99_s == pytest.approx(
            quantile(sorted(chain(*own)), 0.99), abs=1.01 * most_beyond_s
        )
        replays.clear()
        Trial(of_two, goals, 1.0, 1, from_now=True).of(Size(1, 1))
        assert [sorted(map(job_ttft_s, replays[0].jobs))[-1], len(replays)] == [max(own[0]), 1]
        monkeypatch.undo()
    with subtests.test("more load is copies of the last requests, as many in all"):
        many = replace(seen, requests=conversations(400, 4.0))
        assert len(Trial(many, goals, 4.0, 1).workload.requests) == 800
    with subtests.test("the least load is one conversation"):
        few = Trial(replace(seen, requests=seen.requests[:2]), goals, 0.1, 1)
        assert len(few.workload.requests) == 1
    with subtests.test("a prompt has room though pools are smaller in the mean"):
        small = replace(FLEET, prefill_pool_tokens=500, decode_pool_tokens=500)
        outlook = Trial(Observation(small, seen.requests[:8]), goals, 1.0, 1).of(Size(1, 1))
        assert outlook.ttft_p99_s < 60
    with subtests.test("long prompts are computed in whole chunks, though a replay's blocks are larger"):
        long = [observed(100.0 * n, range(999 * n, 999 * n + 600), (100, 38_407)[n % 2]) for n in range(16)]
        outlook = Trial(Observation(FLEET, long), goals, 1.0, 1).of(Size(1, 1))
        assert outlook.ttft_p99_s == pytest.approx(long[1].ttft_s, rel=0.02)
    with subtests.test("no number of ranks is enough for what one request alone misses"):
        assert advise(replace(seen, requests=seen.requests[:20]), Goals(0.001, 0.05)).least is None
    with subtests.test("ranks that do both may do as well with fewer"):
        easy = advise(seen, Goals(3.0, 0.5))
        assert easy.together is not None and easy.together.size == Size(0, 1) and easy.together.meets
        assert easy.split_loses.startswith("prefill and decode apart lose here: 1 rank that does both meets")
    with subtests.test("where only prefill ranks may compute, they are not tried"):
        apart = advise(replace(seen, fleet=replace(FLEET, plans=frozenset({Plan.REMOTE}))), goals)
        assert apart.together is None and not apart.split_loses
        assert all(outlook.size.prefill for outlook in apart.tried)
    with subtests.test("ranks too few are busier than full, though conversations go on later on them"):
        crowd = Observation(FLEET, conversations(60, 8.0))
        compute_s = sum(each.compute_s for each in crowd.requests)
        span_s = crowd.requests[-1].arrival_s - crowd.requests[0].arrival_s
        found = Trial(crowd, goals, 1.0, 1).of(Size(1, 1))
        assert found.prefill_busy + found.decode_busy == pytest.approx(compute_s / span_s, rel=0.1)
    with subtests.test("a request that waits since before the window makes that no longer"):
        old = replace(crowd.requests[0], arrival_s=crowd.requests[0].arrival_s - 500.0, ttft_s=0.0)
        fleet = replace(FLEET, window_s=span_s)
        beside = Trial(Observation(fleet, [old, *crowd.requests]), goals, 1.0, 1).of(Size(1, 1))
        assert beside.prefill_busy == pytest.approx(found.prefill_busy, rel=0.1)
    with subtests.test("who plans from now on has those served first that wait"):
        late = [
            replace(each, ttft_s=0.0, is_over=False) if n >= 30 else each
            for n, each in enumerate(seen.requests)
        ]
        waiting = advise(replace(seen, requests=late), goals, in_steps=True)
        served = advise(seen, goals, in_steps=True)
        assert waiting.present.ttft_p99_s > served.present.ttft_p99_s
        assert waiting.least.size.ranks > served.least.size.ranks
    with subtests.test("there must be something to plan from"):
        with pytest.raises(ValueError, match="no requests"):
            advise(replace(seen, requests=()), goals)
        with pytest.raises(ValueError, match="above 0"):
            Goals(0.0, 0.05)


def test_a_simulated_step_gives_who_goes_on_as_much_as_a_real_one():
    assert ranks.BESIDE_LAST == admitting.BESIDE_LAST


class Computing(ranks.PrefillRank):
    """A simulated rank that computes prompts, and who ended."""

    def __init__(self) -> None:
        self.ends: list[Job] = []
        super().__init__(RankId("one", 0, Generation(1)), 500, Timing(), Events())

    def come(self, ids: range | list[int], source_blocks: int = 0) -> Job:
        request = TraceRequest(0, 0.0, tuple(ids), BLOCK_TOKENS * len(ids), 1, "")
        job = Job(request, None, self, self.ends.append, self.ends.append, source_blocks=source_blocks)
        self.submit(job)
        return job

    def _computed(self, job: Job) -> None:
        self.ends.append(job)


def test_a_simulated_prompt_is_due_later_by_what_its_source_did_not_bring():
    rank = Computing()
    long, pulling, short = (
        rank.come(range(100)),
        rank.come(range(1000, 1040), 39),
        rank.come(range(2000, 2020)),
    )
    rank.pull_ended(pulling, (), 39 * BLOCK_TOKENS)
    rank.events.run()
    assert rank.ends == [short, pulling, long]


def test_a_simulated_prompt_waits_for_what_another_brings_and_not_for_its_end():
    rank = Computing()
    long, short = rank.come(range(100)), rank.come([*range(6), *range(1000, 1010)])
    rank.events.run()
    assert rank.ends == [short, long]
    assert (short.computed_tokens, short.common_tokens) == (10 * BLOCK_TOKENS, 6 * BLOCK_TOKENS)
