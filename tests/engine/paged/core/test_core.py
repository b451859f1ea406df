"""The engine core around the fake runner: whatever happens, the tokens are right and the books balance."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paged.core_rank import Prefill, Rank
from services.engine.fake import FakeRunner, continuation, mix
from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.model_runner import Sampled
from services.engine.paged.sequence import Phase, Sequence
from services.kv.prefix_cache import PrefixCache
from services.values.errors import InvalidRequest, NoCapacity
from services.values.request import FinishReason, GenerationRequest, SamplingParams


def test_tokens_are_exact(subtests):
    for chunk_size, prompt_len, page_size in product([1, 7, 64], [1, 15, 16, 17, 40], [1, 4, 16]):
        with subtests.test(chunk_size=chunk_size, prompt_len=prompt_len, page_size=page_size):
            rank = Rank(num_pages=128, page_size=page_size, chunk_size=chunk_size)
            prompt = [(i * 7) % 500 for i in range(prompt_len)]
            seq = rank.submit(prompt, 20)
            rank.run([seq])
            assert rank.tokens[seq] == continuation(prompt, 20)
            assert rank.finished[seq] is FinishReason.LENGTH
            assert rank.core.check().private == 0

    with subtests.test("output so far counts as output"):
        rank = Rank()
        so_far = continuation([5, 6, 7], 3)
        seq = rank.submit([5, 6, 7], 5, output_ids_so_far=tuple(so_far))
        rank.run([seq])
        assert so_far + rank.tokens[seq] == continuation([5, 6, 7], 5)


def test_what_is_cached_is_used_and_nothing_that_is_not_written(subtests):
    with subtests.test("second turn reuses the first answer included"):
        rank = Rank(page_size=4, num_pages=64)
        first = rank.submit(range(10), 10)
        rank.run([first])
        turn = list(range(10)) + rank.tokens[first] + [3, 1]
        second = rank.submit(turn, 4)
        rank.run([second])
        # The newest token's KV is never stored: 19 tokens are, 16 of them in whole pages.
        assert rank.reserved[second].prefix_len == 16
        assert rank.tokens[second] == continuation(turn, 4)

    with subtests.test("the same delta received twice is kept once"):
        # Else a sequence that needs the whole pool could wait for itself.
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

    with subtests.test("nothing is matched before it is written"):
        # Pages reserved for a delta, or not computed yet, are nobody's prefix.
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


def test_the_same_prompt_at_once(subtests):
    with subtests.test("the same prompt is computed once also while it is computed"):
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

    with subtests.test("a half done prefill is offered to the second transfer too"):
        rank = Rank(num_pages=64, page_size=4, chunk_size=6)
        transfers = [rank.submit(range(18), 1, transfer_id=70 + i) for i in range(2)]
        rank.run(transfers)
        for seq in transfers:
            offers = rank.offered[seq]
            assert [o.start_token for o in offers] == [0, *(o.end_token for o in offers[:-1])]
            assert offers[-1].end_token == 18
            slots = rank.runner.slots[[page for o in offers for page in o.pages]].reshape(-1)[:18]
            assert [int(slot) for slot in slots] == [mix(token, token) for token in range(18)]
        assert rank.computed_tokens == 18 + 2
        for seq in transfers:
            rank.core.transfer_ended(seq)
        assert rank.core.check().private == 0

    with subtests.test("who waited for anothers pages goes on alone when that one is cancelled"):
        rank = Rank(num_pages=64, page_size=4, chunk_size=6)
        prompt = list(range(50, 83))
        first, second = rank.submit(prompt, 3), rank.submit(prompt, 3)
        rank.step()
        rank.core.cancel(first)
        rank.run([second])
        assert rank.tokens[second] == continuation(prompt, 3)
        assert second.reused_tokens == 4


def test_who_has_priority_goes_on_where_another_is_in_the_same_prompt(subtests):
    """The other one follows: no page is computed twice, but what it has of the one that it was filling."""
    for halfway in range(1, 8):
        with subtests.test(halfway=halfway):
            rank = Rank(num_pages=64, page_size=4, chunk_size=5)
            prompt = list(range(50, 98))
            low = rank.submit(prompt, 1, transfer_id=1)
            for _ in range(halfway):
                rank.step()
            ready, filling = low.computed // 4 * 4, low.computed % 4
            high = rank.submit([*prompt, 7, 8], 1, transfer_id=2, priority=1)
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
                rank.core.transfer_ended(seq)
            assert rank.core.check().private == 0


def test_pages_that_others_read_or_write(subtests):
    with subtests.test("prefill offers every page once and keeps it for the transfer"):
        rank = Rank(page_size=4, chunk_size=6)
        seq = rank.submit(range(18), 5, transfer_id=77)
        rank.run([seq])
        spans = [(o.start_token, o.end_token) for o in rank.offered[seq]]
        assert spans == [(0, 4), (4, 12), (12, 18)]
        assert rank.tokens[seq] == continuation(range(18), 1)
        books = rank.core.check()
        assert books.private + books.locked == 5  # the transfer may still read them
        rank.core.transfer_ended(seq)
        assert rank.core.check().locked == rank.core.check().private == 0

    with subtests.test("received kv is used as it landed"):
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
            rank.runner.slots[target] = donor.slots[source]
        first = continuation(prompt, 1)[0]
        rank.core.landed(seq, Sampled(first))
        rank.run([seq])
        assert rank.tokens[seq] == continuation(prompt, 6)

    with subtests.test("quarantined pages are lent to nobody"):
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


@settings(max_examples=40, deadline=None)
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


def test_what_a_step_and_the_load_report(subtests):
    with subtests.test("a step says when only the outside can help"):
        # Or the engine thread would spin as long as a prefill, a writer or a transfer takes.
        rank = Rank(num_pages=4, page_size=4)
        receiving = rank.submit(range(11), 2, receives=True)
        assert rank.core.step()
        waiting = rank.submit(range(100, 110), 2)
        assert not rank.core.step()
        rank.core.cancel(receiving)
        assert rank.core.step()
        rank.run([waiting])
        assert not rank.core.step()

    with subtests.test("prompt tokens are counted as computed whatever becomes of their request"):
        rank = Rank(num_pages=64, chunk_size=8)
        left = rank.submit(range(20), 5)
        rank.step()
        rank.core.cancel(left)
        assert rank.core.load().computed_tokens == 8
        rank.run([rank.submit(range(100, 120), 5)])
        assert rank.core.load().computed_tokens == 28


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_either_role_is_exact_and_balances(data):
    """Receivers that land, fail or are quarantined, retractions and priorities; or transfers that read on."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    rank = Rank(
        num_pages=data.draw(st.integers(24 // page_size, 40 // page_size)),
        page_size=page_size,
        chunk_size=data.draw(st.integers(1, 9)),
        cache=data.draw(st.booleans()),
        max_running=4,
    )
    kinds = data.draw(st.sampled_from([("local", "remote"), ("transfer",)]))
    prefill = Prefill(rank.runner)
    sent, quarantined, transfers = [], [], []

    def receiving():
        return [s for s in sent if s.phase is Phase.RECEIVING]

    def land(seq):
        reserved = rank.reserved[seq]
        first = prefill.run(seq.ids, reserved.delta_pages, reserved.prefix_len)
        rank.core.landed(seq, Sampled(first))

    def check_transfers():
        for seq in transfers:
            ids = seq.request.prompt_ids
            for offered in rank.offered.get(seq, []):
                for number, page in enumerate(offered.pages):
                    start = offered.start_token + number * page_size
                    for position in range(start, min(start + page_size, offered.end_token)):
                        slot = rank.runner.slots[page, position % page_size]
                        assert slot == mix(ids[position], position)

    actions = ["submit", "submit", "step", "step", "step", "land", "cancel", "unquarantine", "end_transfer"]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(actions))
        if action == "submit":
            prompt = [7] * data.draw(st.integers(0, 8))
            prompt += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            kind = data.draw(st.sampled_from(kinds))
            transfer_id = len(sent) if kind == "transfer" else None
            seq = rank.submit(
                prompt,
                data.draw(st.integers(1, 8)),
                receives=kind == "remote",
                transfer_id=transfer_id,
                priority=data.draw(st.integers(0, 1)),
            )
            sent.append(seq)
            transfers += [seq] if transfer_id is not None else []
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
        elif action == "end_transfer" and transfers:
            rank.core.transfer_ended(transfers.pop(data.draw(st.integers(0, len(transfers) - 1))))
        else:
            rank.step()
        rank.core.check()
        check_transfers()

    for seq in quarantined:
        rank.core.end_quarantine(seq)
    for seq in transfers:
        rank.core.transfer_ended(seq)
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
