"""What prompts that wait have in common is computed once, and a load report says how much that is."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paged.core_rank import Rank
from services.engine.paged import in_common
from services.engine.paged.carrying import Carrying
from services.engine.paged.in_common import InCommon
from services.engine.paged.sequence import Phase, Sequence
from services.values.request import GenerationRequest, SamplingParams

BLOCK = 4
STARTS = [[1] * 24, [1] * 12 + [2] * 12, [1] * 12 + [3] * 20, [4] * 20]


@contextmanager
def short_prompts_counted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_common, "_LEAST_TOKENS", 1)
        patch.setattr(in_common, "_BLOCK_TOKENS", BLOCK)
        yield


def alike(first, second):
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


prompts = st.builds(
    lambda start, length, tail: start[:length] + tail,
    st.sampled_from(STARTS),
    st.integers(1, 32),
    st.lists(st.integers(5, 6), max_size=6),
)


@dataclass
class Listed:
    """All that is pending, in order, each with the tokens that others bring; compared id by id."""

    pending: dict[Sequence, int] = field(default_factory=dict)

    def brought(self, seq, others):
        whole = [alike(seq.ids, o.ids) for o in others if o.request.cache_salt == seq.request.cache_salt]
        last = (len(seq.ids) - 1) // BLOCK * BLOCK
        return min(max(whole, default=0) // BLOCK * BLOCK, last)

    def came(self, seq):
        self.pending[seq] = self.brought(seq, self.pending)

    def left(self, seq, is_computed):
        order = list(self.pending)
        del self.pending[seq]
        if is_computed:
            return
        for index, other in enumerate(order):
            if other.request.cache_salt != seq.request.cache_salt:
                continue
            if index > order.index(seq) and alike(other.ids, seq.ids) >= BLOCK:
                before = [o for o in order[:index] if o is not seq and alike(o.ids, other.ids) >= BLOCK]
                self.pending[other] = min(self.pending[other], self.brought(other, before))


steps = st.one_of(
    st.tuples(st.just("came"), prompts, st.sampled_from(["", "salt"])),
    st.tuples(st.sampled_from(["computed", "cancelled"]), st.integers(0, 30)),
)


@given(st.lists(steps, max_size=25))
@short_prompts_counted()
def test_what_is_in_common_is_that_of_a_list(steps):
    def estimate(seq):
        seq.uncomputed_tokens = len(seq.ids)

    book, listed = InCommon(SimpleNamespace(page_size=2, enabled=True), estimate), Listed()
    for number, (what, *how) in enumerate(steps):
        if what == "came":
            ids, salt = how
            asked = GenerationRequest(f"r{number}", tuple(ids), SamplingParams(), cache_salt=salt)
            seq = Sequence(asked, number, phase=Phase.WAITING)
            book.came(seq)
            listed.came(seq)
        elif listed.pending:
            seq = list(listed.pending)[how[0] % len(listed.pending)]
            seq.computed = len(seq.ids) if what == "computed" else 0
            # Of a prompt without a full block nobody finds anything.
            listed.left(seq, is_computed=what == "computed" or len(seq.ids) < BLOCK)
            book.left(seq)
            book.left(seq)
        assert {seq: seq.in_common for seq in listed.pending} == listed.pending
        assert book.tokens(listed.pending, ()) == sum(listed.pending.values())
    for seq in list(listed.pending):
        seq.computed = len(seq.ids)
        book.left(seq)
    assert not book._pending and not book._holders


@settings(max_examples=60)
@given(
    st.lists(prompts, min_size=1, max_size=6), st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 2.0])
)
@short_prompts_counted()
def test_it_is_what_a_rank_need_not_compute(prompts, max_running, has_cache, shorter_first):
    """The rank computes as many tokens of prompts that come at once as it reports. Where a shorter one goes
    first that may be fewer, as a longer one then finds all of it, or a page more, which the longer one had
    begun."""
    about = dict(max_running=max_running, cache=has_cache, shorter_first=shorter_first)
    rank = Rank(num_pages=200, page_size=BLOCK, chunk_size=8, **about)
    seqs = [rank.submit(prompt, 1) for prompt in prompts]
    load = rank.core.load()
    assert load.pending_tokens == sum(map(len, prompts))
    rank.run(seqs)
    reported = load.pending_tokens - load.common_tokens
    most = reported + BLOCK * len(prompts) if shorter_first else reported
    assert rank.computed_tokens <= most and (shorter_first or rank.computed_tokens == reported)
    assert rank.core.load().common_tokens == 0
    assert not rank.core._in_common._pending


@short_prompts_counted()
def test_who_is_cancelled_brings_nothing():
    rank = Rank(num_pages=64, page_size=BLOCK, max_running=1)
    first, second, third = [rank.submit([1] * 40 + [n] * 4, 1) for n in (2, 3, 4)]
    assert rank.core.load().common_tokens == 80
    rank.core.cancel(first)
    assert rank.core.load().common_tokens == 40
    rank.step()
    rank.core.cancel(second)
    load = rank.core.load()
    assert load.common_tokens == 0 and load.pending_tokens == 44 - 8
    rank.run([third])


@short_prompts_counted()
def test_scores_of_a_prompt_are_computed_in_any_case():
    rank = Rank(num_pages=64, page_size=BLOCK)
    scored = {"prompt_logprobs": 0, "prompt_logprobs_start": 17}
    seqs = [rank.submit([1] * 40, 1, scored=scored) for _ in range(3)]
    load = rank.core.load()
    assert load.common_tokens == 2 * 16
    rank.run(seqs)
    assert rank.computed_tokens == load.pending_tokens - load.common_tokens


@short_prompts_counted()
def test_who_is_cancelled_makes_no_work_with_those_that_find_the_same_elsewhere(monkeypatch):
    """Thousands that wait may all begin with one system prompt, and be cancelled one by one."""
    hashed, estimated = [], []
    hashes_of, estimate = in_common.sequence_hashes, Carrying.estimate
    monkeypatch.setattr(in_common, "sequence_hashes", lambda *a: hashed.append(a) or hashes_of(*a))
    monkeypatch.setattr(Carrying, "estimate", lambda self, seq: estimated.append(seq) or estimate(self, seq))
    rank = Rank(num_pages=64, max_running=1)
    seqs = [rank.submit([1] * BLOCK + [n] * 40, 1) for n in range(2, 12)]
    for seq in seqs:
        rank.core.cancel(seq)
    assert len(hashed) == len(seqs)
    assert estimated == [*seqs, *seqs[1:]]  # Each but the first was once the first that was left.


def test_short_prompts_are_left_out():
    rank = Rank(num_pages=64, page_size=BLOCK, max_running=1)
    for _ in range(3):
        rank.submit([1] * 40, 1)
    assert rank.core.load().common_tokens == 0 and not rank.core._in_common._pending
