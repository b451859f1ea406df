"""The engine core around the fake runner: whatever happens, the tokens are right and the books balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core_rank import CountingRunner, Prefill, Rank
from services.engine.fake import FakeRunner, _mix, continuation
from services.engine.paged.admission import Patience
from services.engine.paged.core import EngineCore, Limits
from services.engine.paged.runner import Sampled
from services.engine.paged.sequence import Phase, Sequence
from services.errors import InvalidRequest, NoCapacity
from services.kv.prefix_cache import PrefixCache
from services.request import FinishReason, GenerationRequest, SamplingParams


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_tokens_are_exact(page_size, prompt_len, chunk_size):
    rank = Rank(num_pages=128, page_size=page_size, chunk_size=chunk_size)
    prompt = [(i * 7) % 500 for i in range(prompt_len)]
    seq = rank.submit(prompt, 20)
    rank.run([seq])
    assert rank.tokens[seq] == continuation(prompt, 20)
    assert rank.finished[seq] is FinishReason.LENGTH
    assert rank.core.check().private == 0


def test_second_turn_reuses_the_first_answer_included():
    rank = Rank(page_size=4, num_pages=64)
    first = rank.submit(range(10), 10)
    rank.run([first])
    turn = list(range(10)) + rank.tokens[first] + [3, 1]
    second = rank.submit(turn, 4)
    rank.run([second])
    # The newest token's KV is never stored: 19 tokens are, 16 of them in whole pages.
    assert rank.reserved[second].prefix_len == 16
    assert rank.tokens[second] == continuation(turn, 4)


def test_retraction_goes_on_with_the_same_tokens():
    rank = Rank(num_pages=12, page_size=4)
    prompts = [[i, i + 1, i + 2] for i in range(3)]
    seqs = [rank.submit(p, 20) for p in prompts]
    rank.run(seqs)
    assert rank.core.retractions > 0
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert rank.tokens[seq] == continuation(prompt, 20)


def test_with_enough_kept_back_for_growth_nobody_is_retracted():
    """Each one fits alone with all it may generate; how many do together is the reserve's to say."""
    outcomes = {}
    for share in (0.0, 1.0):
        rank = Rank(num_pages=12, page_size=4, expected_output=share)
        prompts = [[i, i + 1, i + 2] for i in range(6)]
        seqs = [rank.submit(p, 20) for p in prompts]
        rank.run(seqs)
        assert [rank.tokens[seq] for seq in seqs] == [continuation(p, 20) for p in prompts]
        outcomes[share] = rank.core.retractions
    assert outcomes[0.0] > 0
    assert outcomes[1.0] == 0


def test_the_load_says_how_fast_those_that_wait_come_in():
    rank = Rank(num_pages=64, max_running=1)
    seqs = [rank.submit([i, 1, 2], 5) for i in range(12)]
    assert rank.core.load().queue_wait_s == 0.0  # nothing is known yet
    rank.run(seqs[:6])
    began = rank.now
    foretold_s, load = rank.core.load().queue_wait_s, rank.core.load()
    assert load.waiting == 6
    rank.run(seqs[6:])
    assert foretold_s == pytest.approx(rank.now - began, rel=0.5)
    assert rank.core.load().admitted_per_s == 0.0  # nobody waits


def test_those_that_leave_the_queue_leave_it_empty():
    rank = Rank(num_pages=64, max_running=1)
    seqs = [rank.submit([i, 1, 2], 5) for i in range(8)]
    rank.run(seqs[:6])
    assert rank.core.load().admitted_per_s > 0
    for seq in seqs[6:]:
        rank.core.cancel(seq)
    assert rank.core.load().admitted_per_s == 0.0


def test_the_reserve_counts_what_those_who_end_earlier_give_back():
    rank = Rank(num_pages=10, page_size=4, expected_output=1.0)
    ends_soon = rank.submit(range(15), 5)  # 5 pages at its end
    rank.step()
    # 8 pages at its end, which do not fit beside it, but it is not there any more by then.
    long = rank.submit(range(100, 107), 25)
    rank.step()
    assert long.phase is not Phase.WAITING
    rank.run([ends_soon, long])
    assert rank.core.retractions == 0


def test_the_reserve_counts_what_a_second_turn_gives_back():
    """Its own match is no sign that others hold its pages."""
    rank = Rank(num_pages=12, page_size=4, expected_output=1.0)
    first = rank.submit(range(15), 2)
    rank.run([first])
    turn = rank.submit([*range(15), *rank.tokens[first], 7], 4)  # 6 pages at its end
    rank.step()
    long = rank.submit(range(100, 107), 35)  # 11 pages at its end
    rank.step()
    assert long.phase is not Phase.WAITING
    rank.run([turn, long])
    assert rank.core.retractions == 0


def test_the_reserve_counts_a_prefix_that_was_taken_over_as_nobodys():
    """While it is computed: nobody has matched it."""
    rank = Rank(num_pages=20, page_size=4, expected_output=1.0)
    sharing = [rank.submit([*range(32), 100 + i], 6) for i in range(2)]  # 12 pages at their ends, 8 shared
    while any(len(rank.tokens.get(seq, ())) < 2 for seq in sharing):
        rank.step()
    assert rank.core.cache.books().locked == 8
    growing = [rank.core._gate._growing(seq) for seq in sharing]
    assert [each.own_pages for each in growing] == [1, 1]


def test_a_retracted_sequence_computes_again_only_what_was_evicted():
    rank = Rank(num_pages=12, page_size=4, expected_output=0.0)
    seqs = [rank.submit([i] * 10, 20) for i in range(2)]
    rank.run(seqs)
    assert rank.core.retractions == seqs[1].retractions == 1
    # Retracted at 6 pages of 8, and the first needed two of them: no more was lost, nor computed again.
    recomputed = rank.computed_tokens - 2 * (10 + 19)
    assert 0 < recomputed <= 2 * 4
    assert [rank.tokens[s] for s in seqs] == [continuation([i] * 10, 20) for i in range(2)]


def test_who_comes_in_again_after_a_retraction_protects_nothing():
    """Nobody else has asked for its pages."""
    rank = Rank(num_pages=12, page_size=4, expected_output=0.0)
    seqs = [rank.submit([i] * 10, 20) for i in range(2)]
    rank.run(seqs)
    assert seqs[1].retractions == 1
    assert not any(node.protected for node in rank.core.cache._tree.nodes())
    turn = rank.submit([1] * 10 + rank.tokens[seqs[1]] + [3], 1)
    rank.run([turn])
    protected = sum(node.protected for node in rank.core.cache._tree.nodes())
    assert 4 * protected == rank.reserved[turn].prefix_len > 0


def test_who_is_retracted_owes_what_the_tree_does_not_have():
    rank = Rank(num_pages=12, page_size=4, expected_output=0.0)
    seqs = [rank.submit([i] * 10, 20) for i in range(2)]
    while rank.core.retractions == 0:
        rank.step()
    assert seqs[1].phase is Phase.WAITING
    cached = rank.core.cache.match_len(seqs[1].ids, "")
    assert 0 < cached < len(seqs[1].ids)
    assert rank.core.load().pending_tokens == len(seqs[1].ids) - cached


def test_retractions_die_out():
    """Each one lifts what is expected of the others, so newcomers wait: no two take turns for ever."""
    rank = Rank(num_pages=16, page_size=2, max_running=16, expected_output=0.0)
    seqs = [rank.submit([i, i + 1], 24) for i in range(16)]
    rank.run(seqs, max_steps=2000)
    assert 0 < rank.core.retractions <= 3 * len(seqs)
    for i, seq in enumerate(seqs):
        assert rank.tokens[seq] == continuation([i, i + 1], 24)


def test_a_room_that_may_be_read_is_never_retracted():
    rank = Rank(num_pages=12, page_size=4, chunk_size=1, expected_output=0.0)
    growing = [rank.submit([i], 30) for i in range(2)]
    rank.step()
    room = rank.submit(range(100, 124), 1, room=7)  # the last to come, hence the first that would go
    rank.run([room])
    rank.core.room_ended(room)
    rank.run(growing)
    assert rank.core.retractions > 0
    assert room.retractions == 0
    spans = [(o.start_token, o.end_token) for o in rank.offered[room]]
    assert spans[0][0] == 0 and spans[-1][1] == 24


def test_a_small_one_does_not_wait_behind_one_that_does_not_fit():
    rank = Rank(num_pages=10, page_size=4)
    running = rank.submit(range(16), 12)
    rank.step()
    large = rank.submit(range(100, 130), 2)
    small = rank.submit([1, 2], 2)
    rank.step()
    assert large.phase is Phase.WAITING and small.phase is not Phase.WAITING
    assert rank.core.load().overtakes == 1
    rank.run([running, large, small])


def test_a_small_one_behind_the_window_is_not_overlooked():
    rank = Rank(num_pages=10, page_size=4, patience=Patience(overtakes=2, wait_s=1e9, window=3))
    running = rank.submit(range(16), 12)
    rank.step()
    large = [rank.submit(range(100 + i, 130 + i), 2) for i in range(5)]
    small = [rank.submit([1, i], 2) for i in range(4)]
    rank.run(small[:2])
    assert running not in rank.finished
    assert [seq.phase for seq in (*large, *small[2:])] == [Phase.WAITING] * 7  # overtaken often enough
    rank.run([running, *large, *small])


def test_those_that_come_in_small_do_not_starve_a_large_one():
    patience = Patience(overtakes=4, wait_s=1e9)
    rank = Rank(num_pages=10, page_size=4, patience=patience)
    running = [rank.submit([i, i + 1], 6) for i in range(4)]
    rank.step()
    large = rank.submit(range(100, 136), 2)
    number = 0
    while large not in rank.finished:
        number += 1
        running.append(rank.submit([200 + number, number], 6))
        rank.step()
        assert large.overtaken <= 4
        assert number < 60
    assert rank.core.load().overtakes == 4


def test_those_who_share_what_is_running_come_in_first():
    rank = Rank(num_pages=64, page_size=4, max_running=2)
    prefix = list(range(40, 56))
    first = rank.submit([*prefix, 1], 12)
    other = rank.submit([9, 9], 3)
    while len(rank.tokens.get(first, ())) < 1:
        rank.step()
    stranger = rank.submit([8, 8, 8], 3)
    mate = rank.submit([*prefix, 2], 3)
    rank.run([first, other, stranger, mate])
    order = list(rank.finished)
    assert order.index(mate) < order.index(stranger)


def test_those_who_share_a_cached_prefix_come_in_together():
    """It ceases to be evictable once, with the first of them."""
    rank = Rank(num_pages=40, page_size=4, expected_output=0.0)
    prefix = list(range(33 * 4))
    rank.run([rank.submit([*prefix, 1], 1)])
    assert rank.core.cache.books().cached == 33
    mates = [rank.submit([*prefix, *[100 + i] * 10], 2, receives=True) for i in range(2)]
    rank.step()
    assert [seq.phase for seq in mates] == [Phase.RECEIVING] * 2


def test_the_same_delta_received_twice_is_kept_once():
    """Else a sequence that needs the whole pool could wait for itself."""
    rank = Rank(num_pages=6, page_size=4, expected_output=0.0)
    prompt, prefill = list(range(50, 59)), Prefill(rank.runner)
    seqs = [rank.submit(prompt, 12, receives=True) for _ in range(2)]
    rank.step()
    for seq in seqs:
        reserved = rank.reserved[seq]
        rank.core.landed(seq, Sampled(prefill.run(prompt, reserved.delta_pages, reserved.prefix_len)))
    books = rank.core.check()
    assert (books.locked, books.private) == (2, 2)
    rank.run(seqs)
    for seq in seqs:
        assert rank.tokens[seq] == continuation(prompt, 12)


def test_the_same_prompt_is_computed_once_also_while_it_is_computed():
    rank = Rank(num_pages=64, page_size=4, chunk_size=8)
    prompt = list(range(50, 83))
    first = rank.submit(prompt, 3)
    second = rank.submit(prompt, 3)
    rank.step()
    third = rank.submit([*prompt, 5, 6], 3)
    rank.run([first, second, third])
    for seq in (first, second, third):
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, 3)
    assert first.reused_tokens == 0
    assert (second.reused_tokens, third.reused_tokens) == (32, 32)
    # The prompt once, its last token again for the second, three for the third, and two answers each.
    assert rank.computed_tokens == 33 + 1 + 3 + 3 * 2


def test_pages_that_were_freed_for_anothers_let_the_next_one_in():
    rank = Rank(num_pages=26, page_size=4, chunk_size=64, expected_output=0.0)
    prompt = list(range(50, 91))
    sharing = [rank.submit(prompt, 40) for _ in range(2)]  # 11 pages each, 10 of them the same
    waiting = rank.submit(range(200, 216), 2)
    rank.step()
    assert waiting.phase is Phase.WAITING
    rank.step()
    rank.step()
    assert waiting.phase is not Phase.WAITING
    rank.run([*sharing, waiting])


def test_a_half_done_prefill_is_offered_to_the_second_room_too():
    rank = Rank(num_pages=64, page_size=4, chunk_size=6)
    rooms = [rank.submit(range(18), 1, room=70 + i) for i in range(2)]
    rank.run(rooms)
    for seq in rooms:
        offers = rank.offered[seq]
        assert [o.start_token for o in offers] == [0, *(o.end_token for o in offers[:-1])]
        assert offers[-1].end_token == 18
        slots = rank.runner._slots[[page for o in offers for page in o.pages]].reshape(-1)[:18]
        assert [int(slot) for slot in slots] == [_mix(token, token) for token in range(18)]
    assert rank.computed_tokens == 18 + 2
    for seq in rooms:
        rank.core.room_ended(seq)
    assert rank.core.check().private == 0


def test_who_waited_for_anothers_pages_goes_on_alone_when_that_one_is_cancelled():
    rank = Rank(num_pages=64, page_size=4, chunk_size=6)
    prompt = list(range(50, 83))
    first, second = rank.submit(prompt, 3), rank.submit(prompt, 3)
    rank.step()
    rank.core.cancel(first)
    rank.run([second])
    assert rank.tokens[second] == continuation(prompt, 3)
    assert second.reused_tokens == 4


@pytest.mark.parametrize("rooms", [True, False])
def test_who_has_priority_is_computed_before_those_who_came_in_earlier(rooms):
    rank = Rank(num_pages=4000, page_size=4, chunk_size=8, max_running=64)
    low = [rank.submit([i + 1] * 82, 5, room=i if rooms else None) for i in range(20)]
    rank.step()
    high = rank.submit(range(300, 308), 5, room=99 if rooms else None, priority=100)
    rank.step()
    assert high in rank.tokens
    rank.run([*low, high])
    first_tokens = list(rank.tokens)
    assert first_tokens == [high, *low]


def test_who_was_overtaken_is_computed_before_those_who_came_in_meanwhile():
    """A retracted sequence, too, finds its place again."""
    rank = Rank(num_pages=30, page_size=4, chunk_size=4, expected_output=0.0)
    running = rank.submit(range(100, 156), 9)
    while running not in rank.tokens:
        rank.step()
    large = rank.submit(range(200, 264), 1)  # 16 pages where there are 15
    small = [rank.submit(range(300 + 50 * i, 320 + 50 * i), 1) for i in range(2)]
    rank.step()
    assert small[0].phase is Phase.COMPUTING and large.phase is Phase.WAITING
    rank.core.cancel(running)
    rank.run([large, *small])
    assert list(rank.tokens) == [running, large, *small]


@pytest.mark.parametrize("halfway", range(1, 8))
def test_who_has_priority_goes_on_where_another_is_in_the_same_prompt(halfway):
    """The other one follows: no page is computed twice, but what it has of the one that it was filling."""
    rank = Rank(num_pages=64, page_size=4, chunk_size=5)
    prompt = list(range(50, 98))
    low = rank.submit(prompt, 1, room=1)
    for _ in range(halfway):
        rank.step()
    ready, filling = low.computed // 4 * 4, low.computed % 4
    high = rank.submit([*prompt, 7, 8], 1, room=2, priority=1)
    steps = 0
    while high not in rank.tokens:
        rank.step()
        steps += 1
    assert steps == -(-(len(prompt) + 2 - ready) // 5)
    rank.run([low])
    # The longer prompt once; and the other's last page, for the logits of its last token.
    assert rank.computed_tokens == len(prompt) + 2 + filling + 4
    for seq in (low, high):
        offers = rank.offered[seq]
        assert [o.start_token for o in offers] == [0, *(o.end_token for o in offers[:-1])]
        rank.core.room_ended(seq)
    assert rank.core.check().private == 0


def test_nothing_is_matched_before_it_is_written():
    """Pages reserved for a delta, or not computed yet, are nobody's prefix."""
    rank = Rank(num_pages=64, page_size=4, chunk_size=4)
    prompt = list(range(50, 83))
    receiving = rank.submit(prompt, 3, receives=True)
    rank.step()
    assert receiving.phase is Phase.RECEIVING
    assert rank.core.cache.match_len(prompt, "") == 0
    computing = rank.submit(prompt, 3)
    for steps in range(1, 4):
        rank.step()
        assert rank.core.cache.match_len(prompt, "") == computing.computed == 4 * steps


def test_a_target_for_the_time_between_tokens_bounds_the_batch():
    """A step takes 1 ms and another for each sequence."""
    rank = Rank(num_pages=64, page_size=4, max_running=32, itl_target_s=0.0085)

    class Timed(CountingRunner):
        def run(self, chunks):
            rank.now += 0.001 * len(chunks)  # the clock's own tick is the fixed part
            return super().run(chunks)

    rank.core.runner = Timed(rank)
    seqs = [rank.submit([i, i + 1], 40) for i in range(20)]
    batches = []
    while len(rank.finished) < len(seqs):
        rank.step()
        batches.append(rank.core.load().running)
    assert max(batches) == 7
    assert batches.count(7) > len(batches) / 2


def test_a_target_does_not_hold_off_those_whose_prefill_takes_its_time():
    """Few decode, for few have landed: that is no reason to let few receive."""
    rank = Rank(num_pages=256, page_size=4, max_running=32, itl_target_s=0.0125)
    prefill = Prefill(rank.runner)

    class Timed(CountingRunner):
        def run(self, chunks):
            rank.now += 0.001 * len(chunks)
            return super().run(chunks)

    rank.core.runner = Timed(rank)
    seqs = [rank.submit([i, i + 1], 3, receives=True) for i in range(30)]
    receiving, decoding = [], []
    while len(rank.finished) < len(seqs):
        rank.step()
        flying = [seq for seq in seqs if seq.phase is Phase.RECEIVING]
        receiving.append(len(flying))
        decoding.append(rank.core.load().running - len(flying))
        for seq in flying[:1]:
            reserved = rank.reserved[seq]
            first = prefill.run(seq.ids, reserved.delta_pages, reserved.prefix_len)
            rank.core.landed(seq, Sampled(first))
    assert max(decoding) <= 3
    assert 8 <= max(receiving) <= 11  # a batch of 11 takes 12 ms


def test_a_target_bounds_prompt_chunks_beside_tokens_but_prompts_are_done():
    rank = Rank(num_pages=256, page_size=4, chunk_size=256, itl_target_s=0.010)
    sizes = []

    class Timed(CountingRunner):
        def run(self, chunks):
            tokens = [len(chunk.token_ids) for chunk in chunks]
            sizes.append(sum(size for size in tokens if size > 1))
            rank.now += 0.0001 * sum(tokens)
            return super().run(chunks)

    rank.core.runner = Timed(rank)
    decoding = rank.submit([1, 2], 200)
    warm = rank.submit(range(200, 300), 1)
    rank.run([warm])
    del sizes[:]
    prompt = rank.submit([i % 500 for i in range(700)], 1)
    rank.run([prompt])
    assert all(16 <= size <= 100 for size in sizes if size)
    assert rank.tokens[prompt] == continuation(prompt.request.prompt_ids, 1)
    rank.run([decoding])


def test_output_so_far_counts_as_output():
    rank = Rank()
    so_far = continuation([5, 6, 7], 3)
    seq = rank.submit([5, 6, 7], 5, output_ids_so_far=tuple(so_far))
    rank.run([seq])
    assert so_far + rank.tokens[seq] == continuation([5, 6, 7], 5)


def test_prefill_offers_every_page_once_and_keeps_it_for_the_room():
    rank = Rank(page_size=4, chunk_size=6)
    seq = rank.submit(range(18), 5, room=77)
    rank.run([seq])
    spans = [(o.start_token, o.end_token) for o in rank.offered[seq]]
    assert spans == [(0, 4), (4, 12), (12, 18)]
    assert rank.tokens[seq] == continuation(range(18), 1)
    books = rank.core.check()
    assert books.private + books.locked == 5  # the room may still read them
    rank.core.room_ended(seq)
    assert rank.core.check().locked == rank.core.check().private == 0


def test_received_kv_is_used_as_it_landed():
    rank = Rank(page_size=4)
    prompt = list(range(11))
    seq = rank.submit(prompt, 6, receives=True)
    rank.step()
    assert seq.phase is Phase.RECEIVING
    donor = FakeRunner(num_pages=8, page_size=4)
    donor_core = EngineCore(donor, PrefixCache(8, 4, 4, "fake"), Limits(), lambda: 0.0)
    other = Sequence(GenerationRequest("d", tuple(prompt), SamplingParams(max_tokens=1)), 1)
    donor_core.submit(other)
    pages = None
    while other.phase is not Phase.ENDED:
        donor_core.step()
        pages = list(other.pages.pages) if other.pages else pages
    for source, target in zip([0, 1, 2], rank.reserved[seq].delta_pages, strict=True):
        rank.runner._slots[target] = donor._slots[source]
    first = continuation(prompt, 1)[0]
    rank.core.landed(seq, Sampled(first))
    rank.run([seq])
    assert rank.tokens[seq] == continuation(prompt, 6)


def test_quarantined_pages_are_lent_to_nobody():
    rank = Rank(num_pages=4, page_size=4)
    seq = rank.submit(range(11), 2, receives=True)
    rank.step()
    rank.core.cancel(seq, quarantine=True)
    assert rank.core.check().quarantined == 3
    waiting = rank.submit(range(100, 110), 2)
    rank.step()
    assert waiting.phase is Phase.WAITING
    rank.core.end_quarantine(seq)
    rank.run([waiting])
    assert rank.core.check().quarantined == 0


def test_refusals():
    rank = Rank(num_pages=4, page_size=4)
    with pytest.raises(InvalidRequest, match="empty"):
        rank.submit([])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        rank.submit([512])
    with pytest.raises(NoCapacity, match="holds 16"):
        rank.submit(range(16))
    seq = rank.submit(range(15))
    rank.run([seq])
    assert rank.tokens[seq] == continuation(range(15), 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_interleaving_is_exact_and_balances(data):
    """Submissions with shared prefixes, cancels and steps in any order on a pool that is too small."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    rank = Rank(
        num_pages=data.draw(st.integers(24 // page_size, 40 // page_size)),
        page_size=page_size,
        chunk_size=data.draw(st.integers(1, 9)),
        cache=data.draw(st.booleans()),
        max_running=4,
    )
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["submit", "step", "step", "cancel"]))
        if action == "submit":
            shared = data.draw(st.integers(0, 8))
            prompt = [7] * shared + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            live.append(rank.submit(prompt, data.draw(st.integers(1, 8))))
        elif action == "cancel" and live:
            rank.core.cancel(live.pop(data.draw(st.integers(0, len(live) - 1))))
            rank.core.check()
        else:
            rank.step()
    rank.run(live)
    for seq in live:
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, seq.request.sampling.max_tokens)
    books = rank.core.check()
    assert books.locked == books.private == 0


def test_a_step_says_when_only_the_outside_can_help():
    """Or the engine thread would spin as long as a prefill, a writer or a room takes."""
    rank = Rank(num_pages=4, page_size=4)
    receiving = rank.submit(range(11), 2, receives=True)
    assert rank.core.step()
    waiting = rank.submit(range(100, 110), 2)
    assert not rank.core.step()
    rank.core.cancel(receiving)
    assert rank.core.step()
    rank.run([waiting])
    assert not rank.core.step()


def test_those_of_lower_priority_give_way_first():
    rank = Rank(num_pages=12, page_size=4)
    low = [rank.submit([i, i + 1, i + 2], 20) for i in range(2)]
    high = rank.submit([9, 9, 9], 20, priority=1)
    rank.run([*low, high])
    assert rank.core.retractions > 0
    assert next(iter(rank.finished)) is high


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_either_role_is_exact_and_balances(data):
    """Receivers that land, fail or are quarantined, retractions and priorities; or rooms that read on."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    rank = Rank(
        num_pages=data.draw(st.integers(24 // page_size, 40 // page_size)),
        page_size=page_size,
        chunk_size=data.draw(st.integers(1, 9)),
        cache=data.draw(st.booleans()),
        max_running=4,
    )
    kinds = data.draw(st.sampled_from([("local", "remote"), ("room",)]))
    prefill = Prefill(rank.runner)
    sent, quarantined, rooms = [], [], []

    def receiving():
        return [s for s in sent if s.phase is Phase.RECEIVING]

    def land(seq):
        reserved = rank.reserved[seq]
        first = prefill.run(seq.ids, reserved.delta_pages, reserved.prefix_len)
        rank.core.landed(seq, Sampled(first))

    def check_rooms():
        for seq in rooms:
            ids = seq.request.prompt_ids
            for offered in rank.offered.get(seq, []):
                for number, page in enumerate(offered.pages):
                    start = offered.start_token + number * page_size
                    for position in range(start, min(start + page_size, offered.end_token)):
                        slot = rank.runner._slots[page, position % page_size]
                        assert slot == _mix(ids[position], position)

    actions = ["submit", "submit", "step", "step", "step", "land", "cancel", "unquarantine", "end_room"]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(actions))
        if action == "submit":
            prompt = [7] * data.draw(st.integers(0, 8))
            prompt += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            kind = data.draw(st.sampled_from(kinds))
            room = len(sent) if kind == "room" else None
            seq = rank.submit(
                prompt,
                data.draw(st.integers(1, 8)),
                receives=kind == "remote",
                room=room,
                priority=data.draw(st.integers(0, 1)),
            )
            sent.append(seq)
            rooms += [seq] if room is not None else []
        elif action == "land" and receiving():
            land(data.draw(st.sampled_from(receiving())))
        elif action == "cancel" and sent:
            seq = sent.pop(data.draw(st.integers(0, len(sent) - 1)))
            if seq.phase is Phase.RECEIVING and data.draw(st.booleans()):
                quarantined.append(seq)
                rank.core.cancel(seq, quarantine=True)
            rank.core.cancel(seq)
        elif action == "unquarantine" and quarantined:
            rank.core.end_quarantine(quarantined.pop())
        elif action == "end_room" and rooms:
            rank.core.room_ended(rooms.pop(data.draw(st.integers(0, len(rooms) - 1))))
        else:
            rank.step()
        rank.core.check()
        check_rooms()

    for seq in quarantined:
        rank.core.end_quarantine(seq)
    for seq in rooms:
        rank.core.room_ended(seq)
    while any(seq not in rank.finished for seq in sent):
        progressed = rank.core.step()
        rank.take()
        landing = receiving()
        for seq in landing:
            land(seq)
        rank.take()
        assert progressed or landing or all(seq in rank.finished for seq in sent), rank.core.load()
    for seq in sent:
        tokens = 1 if seq.single_token else seq.request.sampling.max_tokens
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, tokens)
    books = rank.core.check()
    assert books.locked == books.private == books.quarantined == 0


def test_who_waits_for_pages_is_matched_again_only_when_there_are_more(monkeypatch):
    """A long prompt takes longer to match than a step; those that decode would feel it at every token."""
    rank = Rank(num_pages=10, page_size=4)
    running = rank.submit(range(4), 20)
    rank.step()
    waiting = rank.submit(range(100, 134), 2)
    looks = []
    look_up = rank.core.cache.look_up
    monkeypatch.setattr(rank.core.cache, "look_up", lambda *args: looks.append(1) or look_up(*args))
    for _ in range(10):
        rank.step()
    assert waiting.phase is Phase.WAITING
    assert len(looks) == 1
    rank.run([running, waiting])
    assert rank.tokens[waiting] == continuation(range(100, 134), 2)
