"""What is told of a prompt's tokens is what one computes who caches nothing, and each is told once."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paged.core_rank import Rank
from exactness.prompt_scores import prompt_scores
from services.engine.fake import fake_state, fake_window
from services.engine.paged.model_runner import ScoredPrompt, scores_of
from services.engine.paged.sequence import Phase
from services.values.errors import InvalidRequest
from services.values.prompt_logprobs import MAX_BYTES
from services.values.request import GenerationRequest, SamplingParams

CARRIED = [(), (fake_state(),), (fake_window(6),), (fake_window(3), fake_state())]
STEM = [(i * 7) % 500 for i in range(24)]


def asked(start, num_top=2):
    return {"prompt_logprobs": num_top, "prompt_logprobs_start": start}


def check(rank, seq, start, num_top=2):
    prompt = seq.request.prompt_ids
    assert rank.told.pop(seq) == prompt_scores(prompt, max(1, start), num_top, rank.groups)


def test_which_positions_are_scored(subtests):
    for is_cached, start in product([False, True], [0, 1, 2, 15, 16, 17, 39]):
        with subtests.test("from any position on cached or not", is_cached=is_cached, start=start):
            rank, prompt = Rank(chunk_size=7), [*STEM, *range(16)]
            if is_cached:
                rank.run([rank.submit(prompt, 1)])
            before = rank.computed_tokens
            seq = rank.submit(prompt, 1, scored=asked(start))
            rank.run([seq])
            check(rank, seq, start)
            # Whole pages of 4 may come from the cache, up to the row that tells of the first.
            reused = max(0, start - 1) // 4 * 4 if is_cached else 0
            assert (rank.computed_tokens - before, seq.reused_tokens) == (40 - reused, reused)
            assert rank.core.check().private == 0

    with subtests.test("a prompt of one token tells of none"):
        rank = Rank()
        seq = rank.submit([5], 1, scored=asked(0, 3))
        rank.run([seq])
        check(rank, seq, 0, 3)
        assert rank.tokens[seq] == rank.expected([5], 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_cached_carried_and_retracted(data):
    """In a pool that is too small for all of them at once."""
    rank = Rank(
        num_pages=data.draw(st.sampled_from([18, 40])),
        chunk_size=data.draw(st.sampled_from([3, 8, 64])),
        carried=data.draw(st.sampled_from(CARRIED)),
        expected_output=0.0,
    )
    seqs, starts = [], {}
    for _ in range(data.draw(st.integers(2, 6))):
        stem = STEM[: data.draw(st.integers(1, len(STEM)))]
        prompt = stem + data.draw(st.lists(st.integers(0, 3), max_size=9))
        start = data.draw(st.none() | st.integers(0, len(prompt) - 1))
        is_prefill = data.draw(st.booleans())
        seq = rank.submit(
            prompt,
            data.draw(st.integers(1, 20)),
            scored=None if start is None else asked(start),
            transfer_id=100 + len(seqs) if is_prefill else None,
        )
        seqs.append(seq)
        if start is not None:
            starts[seq] = start
        for _ in range(data.draw(st.integers(0, 6))):
            _step(rank, seqs)
    for _ in range(600):
        if all(seq in rank.finished for seq in seqs):
            break
        _step(rank, seqs)
    for seq in seqs:
        assert rank.tokens[seq] == rank.expected(seq.request.prompt_ids, len(rank.tokens[seq]))
    for seq, start in starts.items():
        check(rank, seq, start)
    assert not rank.told
    assert rank.core.check().private == 0


def _step(rank, seqs):
    rank.step()
    for seq in seqs:
        if seq.transfer_id is not None and seq in rank.finished and seq.transfer_open:
            rank.core.transfer_ended(seq)


def test_after_a_retraction_nothing_is_reported_twice(subtests):
    for carried, computed_again in [(CARRIED[0], 0), (CARRIED[1], 16)]:
        with subtests.test(
            "who was retracted in its prompt goes on from what it has told",
            carried=carried,
            computed_again=computed_again,
        ):
            # Where there is a state and no checkpoint yet, all is computed again, and told no second time.
            rank = Rank(num_pages=64, chunk_size=8, carried=carried)
            seq = rank.submit(STEM, 1, scored=asked(4))
            while seq.computed < 16:
                rank.step()
            rank.core._retract(seq)
            assert seq.phase is Phase.WAITING
            before, told = rank.computed_tokens, len(seq.scores.pieces)
            rank.run([seq])
            check(rank, seq, 4)
            assert told == 2
            assert rank.computed_tokens - before == len(STEM) - 16 + computed_again

    with subtests.test("what was told is not told again after a retraction"):
        rank = Rank(num_pages=64)
        seq = rank.submit(STEM, 9, scored=asked(0))
        rank.submit(range(5), 40)
        while len(rank.tokens.get(seq, ())) < 2:
            rank.step()
        check(rank, seq, 0)
        rank.core._retract(seq)
        rank.run([seq])
        assert not rank.told


def test_who_scores_waits_for_others_only_where_it_may_take_over(subtests):
    with subtests.test("who asks of its prompt does not wait for who computes the same"):
        # And who follows it takes what it computes.
        rank, prompt = Rank(num_pages=64, chunk_size=8), STEM
        plain, scored = rank.submit(prompt, 1), rank.submit(prompt, 1, scored=asked(9))
        rank.run([plain, scored])
        check(rank, scored, 9)
        assert scored.reused_tokens == 8

    for start, carried in product([2, 23], CARRIED[:2]):
        with subtests.test("it waits only for what it may take over", start=start, carried=carried):
            # Of what another one computes in the same step: pages, or a checkpoint.
            rank = Rank(num_pages=64, chunk_size=64, carried=carried)
            rank.submit(STEM, 1)
            scored = rank.submit(STEM, 1, scored=asked(start))
            rank.step()
            assert (scored.computed > 0) is (start == 2)
            rank.run([scored])
            check(rank, scored, start)
            assert scored.reused_tokens == (0 if start == 2 else 20)

    for start in [0, 17, 39]:
        with subtests.test("while it waits what it will compute is reported", start=start):
            rank, prompt = Rank(), [*STEM, *range(16)]
            rank.run([rank.submit(prompt, 1)])
            rank.submit(prompt, 1, scored=asked(start))
            computed = 40 - max(0, start - 1) // 4 * 4
            load = rank.core.load()
            assert (load.pending_tokens, load.waiting_tokens) == (computed, computed)


def test_requests_and_rows_that_are_refused(subtests):
    with subtests.test("a row that would be skipped is found out"):
        scores = ScoredPrompt((1, 2, 3, 4), 2, 0)
        with pytest.raises(AssertionError, match="token 2"):
            scores.asked_of(2, 4)

    for sampling, problem in [
        (asked(4), "sampling.prompt_logprobs_start must be less than the prompt's 4 tokens, got 4"),
        (asked(2**31), "prompt_logprobs_start"),
    ]:
        with (
            subtests.test("what is not in the prompt is refused", sampling=sampling, problem=problem),
            pytest.raises(InvalidRequest, match=problem),
        ):
            scores_of(GenerationRequest("r", (1, 2, 3, 4), SamplingParams(**sampling)))

    with subtests.test("more than a message holds is refused"):
        prompt_len = 1 + MAX_BYTES // 8 // 21

        def ask(prompt_len):
            return scores_of(GenerationRequest("r", (1,) * prompt_len, SamplingParams(prompt_logprobs=20)))

        assert ask(prompt_len).next == 1
        with pytest.raises(InvalidRequest, match="48 MiB, got 20"):
            ask(prompt_len + 1)
