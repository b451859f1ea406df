"""Tenants take turns: whoever asks for little beside another's crowd does not wait for the crowd."""

import random
from collections import Counter, deque
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.paged.core_rank import Rank
from services.engine.fake import continuation
from services.engine.paged import waiting_queue
from services.engine.paged.admitting import Patience
from services.engine.paged.fair_share import FairShare, token_cost
from services.engine.paged.sequence import Phase, Sequence
from services.engine.paged.waiting_queue import (
    ChunkTurns,
    WaitingQueue,
    earliest_first,
    in_turn,
    place_in_line,
    tenant_of,
)
from services.values.rank_reports import RankLoad
from services.values.request import GenerationRequest, SamplingParams, TenantShare

PATIENCE_S = Patience().deadline_s


def waiting(arrival: int, tenant: str, priority: int = 0, left_s: float | None = None) -> Sequence:
    """It came in the second of its number."""
    about = dict(cache_salt=tenant, priority=priority, left_s=left_s)
    request = GenerationRequest(f"r{arrival}", (1,), SamplingParams(), **about)
    return Sequence(request, arrival, submitted_s=float(arrival))


def named(line: list[Sequence]) -> str:
    return " ".join(f"{seq.request.cache_salt}{seq.arrival}" for seq in line)


def test_tenants_take_turns(subtests):
    for had, served_at, wanted in [
        ({}, {}, "c7 a1 b5 a2 b6 a3 a4"),
        ({"a": 1}, {}, "c7 b5 a1 b6 a2 a3 a4"),
        ({"a": 9, "b": 1}, {}, "c7 b5 b6 a1 a2 a3 a4"),
        ({}, {"a": 3, "b": 2}, "c7 b5 a1 b6 a2 a3 a4"),
        ({}, {"b": 3}, "c7 a1 b5 a2 b6 a3 a4"),
    ]:
        with subtests.test(
            "tenants take turns and each ones own come as they arrived",
            had=had,
            served_at=served_at,
            wanted=wanted,
        ):
            sequences = [waiting(n, "a") for n in range(1, 5)] + [waiting(n, "b") for n in (5, 6)]
            sequences.append(waiting(7, "c", priority=1))
            assert named(in_turn(reversed(sequences), had, served_at)) == wanted

    with subtests.test("one tenants line is that of arrival"):
        sequences = [waiting(n, "a", priority=n % 2) for n in range(8)]
        assert named(in_turn(sequences, {"a": 5}, {"a": 2})) == "a1 a3 a5 a7 a0 a2 a4 a6"

    for by_share in (False, True):
        with subtests.test("the line is in turn whoever comes and goes", by_share=by_share):
            chance, running, shares = random.Random(7), Counter[str](), FairShare()
            if by_share:
                shares.came(TenantShare("another"))
            queue = WaitingQueue(Patience(), shares)
            for number in range(2000):
                queue.order(running)
                line = list(queue)
                if not by_share and all(seq.request.left_s is None for seq in line):
                    assert line == in_turn(line, running)
                check_line(line)
                match chance.randrange(6 if line else 2):
                    case 0 | 1:
                        # It becomes empty, or of one tenant, now and then.
                        if len(line) < 12 * (number // 100 % 2):
                            left_s = (
                                chance.choice((None, None, 2.0, 9.0, 90.0)) if number % 500 > 250 else None
                            )
                            tenant = "a" if number % 1000 > 500 else chance.choice("aab")
                            seq = waiting(number, tenant, chance.choice((0, 0, 1)), left_s)
                            seq.place = chance.randrange(9) if by_share else 0.0
                            queue.add(seq)
                    case 2:
                        queue.remove(chance.choice(line))
                    case 3:
                        running = Counter(chance.choices("aab", k=chance.randrange(4)))
                    case choice:
                        seq = line[0] if choice == 4 else chance.choice(line)
                        queue.take(seq, 0.0)
                        running[seq.request.cache_salt] += 1


def check_line(line: list[Sequence]) -> None:
    """Each tenant's own of one priority go by their deadlines, and priorities one after the other."""
    priorities = [seq.request.priority for seq in line]
    assert priorities == sorted(priorities, reverse=True)
    for group in {(seq.request.priority, seq.request.cache_salt) for seq in line}:
        own = [seq for seq in line if (seq.request.priority, seq.request.cache_salt) == group]
        plain = sorted(own, key=place_in_line)
        order = earliest_first([seq.due_s for seq in plain], [seq.submitted_s + PATIENCE_S for seq in plain])
        assert own == [plain[place] for place in order]


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 30)), st.integers(5, 30)), max_size=9),
    st.data(),
)
def test_deadlines_send_nobody_back_and_starve_nobody(line, data):
    """Each has a deadline, and a time from which nobody goes before it, in the order without deadlines."""
    dues, until = ([each[n] for each in line] for n in (0, 1))
    urgent = [due_s is not None and due_s < until_s for due_s, until_s in line]
    order = earliest_first(dues, until)
    place = {number: at for at, number in enumerate(order)}
    assert sorted(order) == list(range(len(line)))
    others = [number for number in order if not urgent[number]]
    assert others == sorted(others), "they keep their order"
    for number in others:
        passed_by = [n for n in order[: place[number]] if n > number]
        assert all(dues[n] < until[number] for n in passed_by)
    if line:
        one = data.draw(st.sampled_from(range(len(line))))
        without = earliest_first([None if n == one else each for n, each in enumerate(dues)], until)
        assert place[one] <= without.index(one), "a deadline sends nobody back"
    until.sort()  # As where they came in this order.
    keys = [
        until_s if due_s is None else min(due_s, until_s) for due_s, until_s in zip(dues, until, strict=True)
    ]
    assert earliest_first(dues, until) == sorted(range(len(keys)), key=keys.__getitem__)


def test_what_cannot_be_in_time_is_not_computed(subtests):
    rank = Rank(num_pages=3000, chunk_size=64)
    long = [number % 500 for number in range(3000)]
    unmeasured = rank.submit([9] * 200, 1, left_s=1e-9)
    rank.run([unmeasured])
    takes_s = 3000 / rank.core.figures.times.prompt_tokens_per_s

    def steps(ids, left_s, **about):
        before = rank.computed_tokens
        seq = rank.submit(ids, 1, left_s=left_s, **about)
        rank.step()
        return seq, rank.computed_tokens - before

    with subtests.test("less than half of what it takes is left"):
        late, computed = steps(long, 0.4 * takes_s)
        assert (late.phase, computed, late in rank.finished) == (Phase.ENDED, 0, False)
        assert rank.failed[late] == "DeadlineExceeded"
    with subtests.test("others were short, at a tenth of the rate"):
        fresh = Rank(num_pages=3000, chunk_size=640)
        fresh.run([fresh.submit(range(64), 1)])
        left_s = 0.4 * 3000 / fresh.core.figures.times.prompt_tokens_per_s
        seq = fresh.submit(long, 1, left_s=left_s)
        fresh.step()
        assert seq.phase is Phase.COMPUTING
    with subtests.test("more is left, so it may be in time"):
        seq, computed = steps(long, 0.8 * takes_s)
        assert (seq.phase, computed) == (Phase.COMPUTING, 64)
        rank.run([seq])
    with subtests.test("nearly all of it is cached"):
        seq, _ = steps([*long, 5], 0.4 * takes_s)
        rank.run([seq])
    for name, about in [("another computes it", {"receives": True}), ("another holds it", {"held": 2800})]:
        with subtests.test(name):
            seq, _ = steps([1, *long], 0.1 * takes_s, **about)
            assert seq.phase in (Phase.RECEIVING, Phase.PULLING)
            rank.core.cancel(seq)
    assert rank.core.check()


def test_a_step_at_which_nothing_happens_sorts_no_line_and_weighs_nobody(monkeypatch):
    rank = Rank(num_pages=16, page_size=4, max_running=4)
    crowd = [rank.submit([number, 1, 2], 12, cache_salt="crowd") for number in range(3)]
    rank.step()
    others = [rank.submit(range(100, 155), 2, cache_salt=salt) for salt in ("quiet", "crowd", "quiet")]
    rank.step()  # which finds that no exchange would be enough
    looked_at = []

    def watch(owner, name, size_of):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: looked_at.append(size_of(*args)) or inner(*args))

    watch(waiting_queue, "in_turn", lambda sequences, *args: {seq.phase for seq in sequences})
    watch(rank.core._gate, "_would_fit", lambda seq, *args: {seq.phase})
    for _ in range(4):
        rank.step()
    assert all(seq.phase is Phase.DECODING for seq in crowd)
    assert looked_at and not any(Phase.WAITING in phases for phases in looked_at)
    rank.run([*crowd, *others])


def test_a_short_request_beside_a_crowd(subtests):
    with subtests.test(
        "a short request beside a crowd comes in at the next step and the crowd loses nothing"
    ):
        rank = Rank(num_pages=200, max_running=4)
        crowd = [rank.submit([number, 1, 2], 40, cache_salt="crowd") for number in range(12)]
        for _ in range(10):
            rank.step()
        short = rank.submit([9, 8, 7], 2, cache_salt="quiet")
        steps = 0
        while short not in rank.finished:
            rank.step()
            steps += 1
        assert steps <= 3
        assert not rank.finished.keys() & set(crowd)
        rank.run(crowd)
        for seq in (*crowd, short):
            assert rank.tokens[seq] == continuation(
                list(seq.request.prompt_ids), seq.request.sampling.max_tokens
            )
        assert rank.core.retractions == 0  # pages were not short
        assert rank.core.check()

    with subtests.test("one that lands in a full batch of another tenants takes a place there"):
        rank = Rank(num_pages=200, max_running=4)
        crowd = [rank.submit([number, 1, 2], 40, cache_salt="crowd") for number in range(12)]
        for _ in range(10):
            rank.step()
        short = rank.submit([9, 8, 7], 2, receives=True, cache_salt="quiet")
        for _ in range(3):  # meanwhile one of the crowd's runs in its place
            rank.step()
        assert short.phase is Phase.RECEIVING
        assert sum(seq.phase is Phase.DECODING for seq in crowd) == 4
        rank.land(short)
        steps = 0
        while short not in rank.finished:
            rank.step()
            steps += 1
        assert steps <= 3
        assert not rank.finished.keys() & set(crowd)
        rank.run(crowd)
        for seq in (*crowd, short):
            assert rank.tokens[seq] == continuation(
                list(seq.request.prompt_ids), seq.request.sampling.max_tokens
            )

    for receives in [False, True]:
        with subtests.test(
            "a crowd that has landed and waits for places keeps nobody out", receives=receives
        ):
            rank = Rank(num_pages=200, max_running=4)
            crowd = [
                rank.submit([number, 1, 2], 40, receives=True, cache_salt="crowd") for number in range(4)
            ]
            rank.step()
            rank.limit(max_running_requests=2)
            rank.land(*crowd)
            rank.step()
            assert [seq.phase for seq in crowd] == [Phase.DECODING] * 2 + [Phase.LANDED] * 2
            short = rank.submit([9, 8, 7], 2, receives=receives, cache_salt="quiet")
            rank.step()
            if receives:
                rank.land(short)
            for _ in range(3):
                rank.step()
            assert short in rank.finished
            rank.land(*(seq for seq in crowd if seq.phase is Phase.RECEIVING))
            rank.run(crowd)

    with subtests.test("a short prompt is computed beside another tenants long one"):
        # A chunk of each in turn; the long one goes on beside many short ones, too.
        rank = Rank(num_pages=200, chunk_size=8, max_running=8)
        long = rank.submit(range(200), 1, cache_salt="crowd")
        rank.step()
        short = [rank.submit([number, *range(100, 107)], 1, cache_salt="quiet") for number in range(4)]
        steps = 0
        while short[0] not in rank.finished:
            rank.step()
            steps += 1
        assert steps <= 2
        before = long.computed
        for _ in range(4):
            rank.step()
        assert long.computed > before
        rank.run([long, *short])


def test_a_tenants_shorter_prompts_overtake_its_longer_ones(subtests):
    with subtests.test("a short prompt does not wait for a long one of its own tenant"):
        rank = Rank(num_pages=200, chunk_size=8, max_running=8)
        long = rank.submit(range(200), 1)
        rank.step()
        short = rank.submit([*range(100, 107)], 1)
        rank.step()
        assert short in rank.finished
        assert long.computed < 24
        rank.run([long])
        assert rank.tokens[long] == continuation(list(range(200)), 1)

    with subtests.test("its step computes little of the long one, and all of another short one"):
        rank = Rank(num_pages=200, chunk_size=32, max_running=8)
        long = rank.submit(range(200), 1)
        rank.step()
        short = [rank.submit([*range(100 * n, 100 * n + 7)], 1) for n in (2, 3)]
        rank.step()
        assert all(seq in rank.finished for seq in short)
        assert long.computed == 32 + 32 // 8
        rank.run([long])

    for about in ({}, {"cache_salt": "other"}, {"priority": 1}):
        with subtests.test("such steps slow the long one down by a bounded part", about=about):
            rank = Rank(num_pages=2000, chunk_size=64, max_running=64, shorter_first=1.0)
            long, steps = rank.submit([number % 500 for number in range(2560)], 1), 0
            while long not in rank.finished:
                rank.submit([steps, 7, 7], 1, **about)
                rank.step()
                steps += 1
            assert 2560 // 64 < steps < 2.2 * 2560 // 64

    with subtests.test("where none may overtake they are computed in the order of arrival"):
        rank = Rank(num_pages=200, chunk_size=8, max_running=8, shorter_first=0.0)
        long = rank.submit(range(200), 1)
        rank.step()
        short = rank.submit([*range(100, 107)], 1)
        rank.run([long])
        assert short not in rank.finished

    with subtests.test("only what is not cached counts as its length"):
        rank = Rank(num_pages=200, chunk_size=8, max_running=8)
        rank.run([rank.submit(range(100, 180), 1)])
        other = rank.submit(range(40), 1)
        cached = rank.submit(range(100, 184), 1)
        rank.step()
        assert cached in rank.finished
        assert other not in rank.finished

    with subtests.test("nor does what a prompt before it brings, for which it waits"):
        document = [number % 400 for number in range(640)]
        rank = Rank(num_pages=400, chunk_size=64, max_running=32)
        first = rank.submit(document, 1)
        rank.step()
        second = rank.submit([*document, *range(400, 408)], 1)
        others = [rank.submit([450 + number] * 100, 1) for number in range(3)]
        while first not in rank.finished:
            assert second.computed <= first.computed
            rank.step()
        later = rank.submit([470] * 100, 1)
        rank.run([later])
        assert list(rank.finished) == [*others, first, second, later]
        assert rank.computed_tokens <= 640 + 3 * 100 + 8 + rank.core.page_size + 100

    with subtests.test("a prompt of higher priority waits for none of a lower one's tokens"):
        rank = Rank(num_pages=400, chunk_size=64, max_running=32)
        first = rank.submit(document, 1)
        rank.step()
        second = rank.submit([*document, *range(400, 408)], 1, priority=1)
        others = [rank.submit([450 + number] * 100, 1) for number in range(3)]
        rank.run([first, second, *others])
        assert next(iter(rank.finished)) is second

    with subtests.test("what a source was to bring and did not counts too"):
        rank = Rank(num_pages=400, chunk_size=32, max_running=64, shorter_first=1.0)
        long = rank.submit([number % 500 for number in range(1000)], 1)
        rank.step()
        overtook = 0
        for number in range(20):
            short = rank.submit([*range(number, number + 400)], 1, held=396)
            rank.step()
            assert short.phase is Phase.PULLING
            rank.core.pulls.failed(short)
            for _ in range(20):
                rank.step()
            overtook += short in rank.finished and long not in rank.finished
        assert overtook == 1  # With another one all would have 800 tokens, and it lacks fewer by then.

    with subtests.test("priority goes before length"):
        rank = Rank(num_pages=200, chunk_size=8, max_running=8)
        long = rank.submit(range(80), 1, priority=1)
        short = rank.submit([*range(100, 107)], 1)
        rank.run([long])
        assert short not in rank.finished


class _Came(NamedTuple):
    after: int  # So many steps after the one before it.
    tokens: int
    tenant: str
    share_expected: float = 1.0  # Of its tokens so many were expected.


_CAME = st.builds(
    _Came, st.integers(0, 6), st.integers(1, 60), st.sampled_from("aab"), st.sampled_from([0.0, 0.4, 1.0])
)


@given(st.lists(_CAME, min_size=1, max_size=12), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_who_overtakes_a_prompt_has_a_bounded_part_of_its_tokens(came, shorter_first):
    """A later prompt goes first only if all that came since have, together, so many times fewer tokens."""
    chunk, shares = 7, FairShare()
    turns = ChunkTurns(shares)
    left: dict[Sequence, int] = {}
    ends: list[Sequence] = []
    arrived: list[Sequence] = []
    later = deque(came)
    wait = later[0].after
    while later or left:
        while later and wait <= 0:
            each = later.popleft()
            seq = waiting(len(arrived), each.tenant)
            seq.ids = list(range(each.tokens))
            seq.phase, seq.uncomputed_tokens = Phase.COMPUTING, int(each.share_expected * each.tokens)
            turns.came(seq)
            arrived.append(seq)
            left[seq] = each.tokens
            wait = later[0].after if later else 0
        wait -= 1
        budget = chunk
        for seq in turns.line(list(left), shorter_first):
            size = min(budget, left[seq])
            budget, left[seq], seq.computed = budget - size, left[seq] - size, seq.computed + size
            if not left[seq]:
                del left[seq]
                ends.append(seq)
    place = {seq: index for index, seq in enumerate(ends)}
    for index, seq in enumerate(arrived):
        since = 0
        for other in arrived[index + 1 :]:
            since += len(other.ids)
            if tenant_of(other) == tenant_of(seq) and place[other] < place[seq]:
                assert since < shorter_first * len(seq.ids)


@given(
    st.lists(_CAME, min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.lists(st.integers(0, 60), min_size=8, max_size=8),
    st.integers(1, 90),
)
def test_what_a_newcomer_is_told_to_overtake_it_does(came, shorter_first, done, tokens):
    """It may overtake others, too: those that are told are told by the shortest of about their length."""
    chunk, turns = 7, ChunkTurns(FairShare())

    def come(number: int, num_tokens: int, computed: int = 0) -> Sequence:
        seq = waiting(number, "a")
        seq.ids, seq.computed, seq.phase = list(range(num_tokens)), computed, Phase.COMPUTING
        seq.uncomputed_tokens = num_tokens
        turns.came(seq)
        return seq

    pairs = zip(came, done, strict=False)
    line = [
        come(number, each.tokens, min(part, each.tokens - 1)) for number, (each, part) in enumerate(pairs)
    ]
    first = turns.line(line, shorter_first)[0]
    told = turns.overtaken(line, shorter_first, chunk)
    load = RankLoad(overtaken=told)
    assert sum(each.prompts for each in told) <= len(line) and (shorter_first or not told)
    passed, prompts = load.passed_by(tokens)
    newcomer = come(len(line), tokens)
    behind = turns.line([*line, newcomer], shorter_first)
    behind = behind[behind.index(newcomer) + 1 :]
    assert prompts <= len(behind)
    assert passed <= sum(seq.remaining_tokens - (chunk if seq is first else 0) for seq in behind)
    if prompts == len(line):
        assert passed == sum(seq.remaining_tokens - (chunk if seq is first else 0) for seq in line)


def test_who_gives_way_and_who_does_not(subtests):
    with subtests.test("nobody gives way to one that has landed where more run than may now"):
        rank = Rank(num_pages=200, max_running=9)
        crowd = [rank.submit([number, 1, 2], 40, cache_salt="crowd") for number in range(8)]
        short = rank.submit([9, 8, 7], 2, receives=True, cache_salt="quiet")
        for _ in range(3):
            rank.step()
        rank.let_run(3)
        rank.land(short)
        for _ in range(5):
            rank.step()
        assert [seq.phase for seq in (*crowd, short)] == [Phase.DECODING] * 8 + [Phase.LANDED]
        rank.core.cancel(crowd[0])
        rank.let_run(7)
        rank.step()
        assert [seq.retractions for seq in crowd] == [0] * 7 + [1]
        rank.run([*crowd[1:], short])

    with subtests.test("tenants run as many as each other and then none gives way"):
        rank = Rank(num_pages=200, max_running=4)
        crowd = [rank.submit([number, 1, 2], 60, cache_salt="crowd") for number in range(8)]
        rank.step()
        others = [rank.submit([number, 8, 7], 60, cache_salt="other") for number in range(8)]
        for _ in range(20):
            rank.step()
            running = [seq for seq in (*crowd, *others) if seq.phase is Phase.DECODING]
            tenants = [seq.request.cache_salt for seq in running]
        assert (tenants.count("crowd"), tenants.count("other")) == (2, 2)
        assert sum(seq.retractions for seq in (*crowd, *others)) == 2
        rank.run([*crowd, *others])

    with subtests.test("a third tenants request of a lower priority keeps nobody from giving way"):
        # It is the last in turn, but its tenant runs no other; that of a higher priority is left alone, too.
        rank = Rank(num_pages=200, max_running=6)
        crowd = [rank.submit([number, 1, 2], 40, cache_salt="crowd") for number in range(12)]
        rank.step()
        rank.core.cancel(crowd[0])
        rank.core.cancel(crowd[1])
        third = rank.submit([50, 1, 2], 40, cache_salt="third", priority=-1)
        first = rank.submit([51, 1, 2], 40, cache_salt="crowd", priority=1)
        for seq in crowd[6:]:
            rank.core.cancel(seq)
        for _ in range(3):
            rank.step()
        running = [*crowd[2:6], third, first]
        assert all(seq.phase is Phase.DECODING for seq in running)
        short = rank.submit([9, 8, 7], 2, cache_salt="quiet")
        for _ in range(3):
            rank.step()
        assert short in rank.finished
        assert [seq.retractions for seq in running] == [0, 0, 0, 1, 0, 0]
        rank.run(running)

    with subtests.test("nobody gives way to one of a lower priority or one that would not fit"):
        rank = Rank(num_pages=16, page_size=4, max_running=8)
        crowd = [rank.submit([number, 1, 2], 12, cache_salt="crowd", priority=1) for number in range(3)]
        for _ in range(3):
            rank.step()
        low = rank.submit(range(40), 2, cache_salt="quiet")
        high = rank.submit(range(100, 155), 2, cache_salt="quiet", priority=1)
        for _ in range(3):
            rank.step()
        assert (low.phase, high.phase) == (Phase.WAITING, Phase.WAITING)
        assert sum(seq.retractions for seq in crowd) == 0
        rank.run([*crowd, low, high])


def test_the_queue_gets_no_shorter_by_an_exchange_nor_by_one_that_was_retracted():
    rank = Rank(num_pages=200, max_running=12)
    crowd = [rank.submit([number, 1, 2], 60, cache_salt="crowd") for number in range(12)]
    rank.step()
    crowd += [rank.submit([number, 1, 2], 60, cache_salt="crowd") for number in range(12, 24)]
    others = [rank.submit([number, 8, 7], 60, cache_salt="other") for number in range(6)]
    for _ in range(5):
        rank.step()
    assert all(seq.phase is Phase.DECODING for seq in others)
    for seq in others:
        rank.core._retract(seq)
    rank.step()
    assert all(seq.phase is not Phase.WAITING for seq in others)
    load = rank.core.load()
    assert (load.waiting, load.admitted_per_s) == (18, 0.0)
    rank.run(crowd[:6])
    assert rank.core.load().admitted_per_s > 0
    rank.run([*crowd, *others])


def shared(tenant, weight=1.0, session_tokens=0):
    return {"share": TenantShare(tenant, weight, session_tokens)}


def test_tenants_get_tokens_by_their_weights(subtests):
    for prompt_len, max_tokens in [(48, 2), (3, 24)]:
        with subtests.test("weights", prompt_len=prompt_len, max_tokens=max_tokens):
            rank = Rank(num_pages=400, max_running=8, chunk_size=48)
            weights = {"three": 3.0, "one": 1.0}
            seqs = {
                rank.submit(range(n, n + prompt_len), max_tokens, **shared(name, weights[name])): name
                for start in range(0, 440, 4)
                for n, name in enumerate(weights, start)
            }
            for _ in range(100):
                rank.step()
            had = Counter(seqs[seq] for seq in rank.tokens)
            assert had["one"] > 8 and had["three"] / had["one"] == pytest.approx(3, rel=0.2)

    with subtests.test("a burst does not delay the first request of another tenant"):
        rank = Rank(num_pages=400, max_running=4)
        crowd = [rank.submit(range(n, n + 40), 30, **shared("crowd")) for n in range(40)]
        for _ in range(100):
            rank.step()
        rank.core._shares.charge(TenantShare("crowd"), 10_000)  # It has lasted for a while.
        short = rank.submit([9, 8, 7], 2, **shared("quiet"))
        for _ in range(3):
            rank.step()
        assert short in rank.finished
        assert any(seq in rank.finished for seq in crowd) and crowd[-1] not in rank.finished

    with subtests.test("without sessions one tenant's requests come in as they arrived"):
        rank = Rank(num_pages=400, max_running=2)
        seqs = [rank.submit(range(n, n + 9), 3, **shared("a")) for n in range(0, 60, 10)]
        rank.run(seqs)
        assert list(rank.finished) == seqs

    with subtests.test("the session that has had least goes first"):
        rank = Rank(num_pages=400, max_running=1)
        running = rank.submit([1, 2, 3], 8, **shared("a"))
        rank.step()
        much, little = (rank.submit([n, 5, 6], 2, **shared("a", session_tokens=n)) for n in (500, 50))
        rank.run([running, much, little])
        assert list(rank.finished) == [running, little, much]

    with subtests.test("what is cached goes first within the slack, and not beyond it"):
        for charged, wanted in [(0, "cached"), (20_000, "first")]:
            rank = Rank(num_pages=400, max_running=1)
            rank.run([rank.submit(range(40), 1, **shared("cached"))])
            running = rank.submit([1, 2, 3], 8, **shared("third"))
            rank.step()
            named = {
                rank.submit(range(100, 140), 2, **shared("first")): "first",
                rank.submit(range(40), 2, **shared("cached")): "cached",
            }
            rank.core._shares.charge(TenantShare("cached"), charged)
            rank.run([running, *named])
            assert named[list(rank.finished)[2]] == wanted


def test_a_prompt_that_is_given_up_costs_what_was_computed(subtests):
    def cost(act, held=None):
        """Return what a prompt of 40 tokens cost that is cancelled after `act(rank, it)`."""
        rank = Rank(num_pages=64)
        stays = rank.submit([1], 30, **shared("a"))  # It keeps the tenant's count.
        rank.step()
        before, held_by = rank.core._shares.had("a"), len(stays.ids)
        seq = rank.submit(range(10, 50), 3, held=held, **shared("a"))
        act(rank, seq)
        rank.core.cancel(seq)
        generated = sum(map(token_cost, range(held_by + 1, len(stays.ids) + 1)))
        paid = rank.core._shares.had("a") - before - generated
        rank.run([stays])
        return round(paid, 6)

    def steps(number):
        return lambda rank, seq: [rank.step() for _ in range(number)]

    def fail_to_pull(number):
        def act(rank, seq):
            rank.step()
            assert seq.phase is Phase.PULLING
            rank.core.pulls.failed(seq)
            steps(number)(rank, seq)

        return act

    def send_back(rank, seq):
        rank.step()
        rank.core._send_back(seq)
        rank.step()
        assert seq.computed == 16

    for name, act, held, paid in [
        ("waiting", steps(0), None, 0),
        ("computing", steps(1), None, 8),
        ("computing", steps(3), None, 24),
        ("computed", steps(5), None, 40 + token_cost(41)),
        ("pulling", steps(1), 24, 0),
        # One pays for no more than what no source was said to hold.
        ("a pull has failed", fail_to_pull(3), 24, 0),
        ("a pull has failed", fail_to_pull(4), 24, 8),
        ("sent back", send_back, None, 16),
    ]:
        with subtests.test(name, paid=paid):
            assert cost(act, held) == pytest.approx(paid)
