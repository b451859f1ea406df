"""Logits are adjusted as adjusting.py does it, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.sampling.plain_draws import chunk_of
from services.engine.torch.draft_tokens import DraftedHistory
from services.engine.torch.sampling.adjusting import Histories, adjust, adjust_on_device

VOCAB_SIZE = 40
IDS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.1]),
        "presence_penalty": st.sampled_from([0.0, 0.3]),
        "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=3).map(lambda d: tuple(d.items())),
        "bad_token_ids": st.lists(st.tuples(IDS), max_size=2).map(tuple),
        "min_tokens": st.sampled_from([0, 50]),
        "stop_token_ids": st.lists(IDS, max_size=2).map(tuple),
    }
)
ROWS = st.lists(
    st.tuples(PARAMS, st.lists(IDS, min_size=1, max_size=30), st.integers(0, 30), st.lists(IDS, max_size=2)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99), growth=st.lists(IDS, min_size=2, max_size=2))
def test_it_adjusts_to_the_same_bits(rows, seed, growth):
    logits = torch.randn(
        len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    histories = Histories(VOCAB_SIZE)
    said = [list(ids) for _, ids, _, _ in rows]
    for token_id in (None, *growth):
        chunks = []
        for own, (params, _, count, drafts) in zip(said, rows, strict=True):
            own.extend([] if token_id is None else [token_id])
            history = DraftedHistory(own, drafts) if drafts else own
            chunks.append(chunk_of(history, min(count, len(history)), **params))
        found = adjust_on_device(logits.clone(), chunks, histories)
        assert torch.equal(found, adjust(logits.clone(), chunks))


def test_histories(subtests, monkeypatch):
    histories = Histories(100)
    with subtests.test("each id is converted once"):
        ids = [1, 2, 3]
        first = histories.ids_of(ids)
        ids.append(4)
        assert histories.ids_of(ids).tolist() == [1, 2, 3, 4]
        assert first.tolist() == [1, 2, 3]
        assert histories.ids_of(ids).base is histories.ids_of(ids).base
    with subtests.test("another list at the same place is another"):
        ids[:] = [7, 8]
        assert histories.ids_of(ids).tolist() == [7, 8]
        assert histories.ids_of((9, 5)).tolist() == [9, 5]
    with subtests.test("few are kept"):
        monkeypatch.setattr("services.engine.torch.sampling.adjusting._MOST_KNOWN", 4)
        many = [[n, n] for n in range(20)]
        for _ in range(2):
            assert [histories.ids_of(each).tolist() for each in many] == many
        assert len(histories._recent) + len(histories._older) <= 8
    with subtests.test("few ids are kept, but all of those that are needed"):
        monkeypatch.setattr("services.engine.torch.sampling.adjusting._MOST_IDS", 30)
        monkeypatch.setattr("services.engine.torch.sampling.adjusting._MOST_KNOWN", 100)
        histories = Histories(100)
        many = [[n] * 10 for n in range(20)]
        for _ in range(2):
            assert [histories.ids_of(each).tolist() for each in many] == many
        assert len(histories._recent) + len(histories._older) <= 6
        long = [5] * 50
        assert histories.ids_of(long).tolist() == long
        assert histories.ids_of(long).base is histories.ids_of(long).base
        assert len(histories._recent) == 1
    for ids in ([5, 100], (-1,), DraftedHistory([1], [100])):
        with subtests.test("an id beyond the vocabulary is none", ids=ids), pytest.raises(IndexError):
            histories.ids_of(ids)
    with subtests.test("nor is a bias's"), pytest.raises(IndexError):
        adjust_on_device(
            torch.zeros(1, 10, dtype=torch.float64), [chunk_of([1], logit_bias=((10, 1.0),))], Histories(10)
        )
