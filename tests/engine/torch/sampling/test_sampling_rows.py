"""Many rows at once choose what each would choose alone, and what the plain definition chooses."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactness.plain_sampling import sample_row
from services.engine.paged.model_runner import Chunk
from services.engine.torch.sampling import torch_sampler as sampling
from services.engine.torch.sampling.torch_sampler import sample
from services.values.request import SamplingParams, TokenLogprobs

VOCAB_SIZE = 1000  # 15 ids in a stripe
CASES = {
    "greedy": {"temperature": 0},
    "greedy, logprobs": {"temperature": 0, "logprobs": 5},
    "greedy, more logprobs": {"temperature": 0, "logprobs": 20},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "all": {},
    "all, hot": {"temperature": 2.0},
    "min_p": {"min_p": 0.02},
    "min_p and top_p": {"min_p": 0.3, "top_p": 0.9, "temperature": 2.0},
    "top_k of few": {"top_k": 5},
    "top_k of more than stripes are wide": {"top_k": 40},
    "top_k of more than there are": {"top_k": 5000},
    "top_p": {"top_p": 0.9},
    "top_p, hot": {"top_p": 0.95, "temperature": 3.0},
    "top_p, hardly any": {"top_p": 0.001},
    "everything": {"top_k": 12, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7, "logprobs": 2},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 0.7, "top_p": 0.9},
    "must go on": {"min_tokens": 50, "stop_token_ids": (3, 4, 5000), "top_k": 3},
}


def chunk(case: str, seed: int, history: list[int], num_output_ids: int) -> Chunk:
    params = SamplingParams(seed=seed, **CASES[case])
    return Chunk([0], 0, [0], True, params, history, num_output_ids, (7,))


def random_logits(num_rows: int, kind: str, seed: int) -> torch.Tensor:
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return {
        "peaked": logits * 6,
        "flat": logits * 0.01,
        "equal": torch.zeros_like(logits),
        "ties": (logits * 4).round() / 4,
        "mostly forbidden": torch.where(logits > 2, logits, -torch.inf),
    }[kind]


KINDS = ("peaked", "flat", "equal", "ties", "mostly forbidden")
ROWS = st.lists(
    st.tuples(
        st.sampled_from(sorted(CASES)),
        st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=6,
)


def assert_same(got, expected):
    assert got.token_id == expected.token_id
    assert (got.logprobs is None) == (expected.logprobs is None)
    if got.logprobs is not None:
        assert got.logprobs.logprob == pytest.approx(expected.logprobs.logprob)
        assert [i for i, _ in got.logprobs.top] == [i for i, _ in expected.logprobs.top]
        assert [p for _, p in got.logprobs.top] == pytest.approx([p for _, p in expected.logprobs.top])


@settings(max_examples=150, deadline=None)
@given(
    rows=ROWS,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 999),
    num_sorted=st.sampled_from([1, 256]),
    block=st.sampled_from([1, 2500, 1 << 18]),
)
def test_a_batch_chooses_what_each_row_alone_does_by_definition(rows, kind, seed, num_sorted, block):
    chunks = [chunk(case, s, history, min(n, len(history))) for case, s, history, n in rows]
    logits = random_logits(len(rows), kind, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling, "_CPU_BLOCK", block)
        patched.setattr(sampling, "_SORTED", num_sorted)
        got = sample(logits, chunks)
    for row, (sampled, own) in enumerate(zip(got, chunks, strict=True)):
        assert_same(sampled, sample_row(logits[row].double().numpy(), own))
        assert sampled == sample(logits[row : row + 1], [own])[0]


def test_rows_are_chosen_each_by_itself(subtests):
    for dtype, case in itertools.product([torch.float32, torch.bfloat16], sorted(CASES)):
        with subtests.test("who else is in the batch changes no row", dtype=dtype, case=case):
            logits = random_logits(len(CASES) + 1, "ties", 1).to(dtype)
            own = chunk(case, 12, [1, 2, 3, 2], 2)
            others = [chunk(other, n, [n], 1) for n, other in enumerate(sorted(CASES))]
            [alone] = sample(logits[:1], [own])
            assert sample(logits, [own, *others])[0] == alone
            assert sample(logits.flip(0), [*others, own])[-1] == alone
            assert_same(alone, sample_row(logits[0].double().numpy(), own))
    with subtests.test("a row that overflowed fails no other of its block"):
        logits = random_logits(4, "peaked", 3)
        chunks = [chunk(case, 1, [1], 0) for case in ("top_p", "top_k of few", "all", "greedy, logprobs")]
        expected = sample(logits, chunks)
        for broken in (torch.nan, torch.inf):
            for row in range(4):
                damaged = logits.clone()
                damaged[row, 17] = broken
                got = sample(damaged, chunks)
                assert got[row].token_id == 17
                if got[row].logprobs is not None:
                    assert got[row].logprobs == TokenLogprobs(17, -np.inf, ())
                assert [s for i, s in enumerate(got) if i != row] == [
                    s for i, s in enumerate(expected) if i != row
                ]
    with subtests.test("what is sampled leaves the logits as they were"):
        logits = random_logits(len(CASES), "peaked", 4).double()
        before = logits.clone()
        sample(logits, [chunk(case, 1, [1, 2], 1) for case in CASES])
        assert torch.equal(logits, before)
    with (
        subtests.test("a point that rounding puts at the very end finds the last id that can be"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        monkeypatch.setattr(sampling, "uniform", lambda seed, position: 1.0)
        logits = torch.full((1, VOCAB_SIZE), -torch.inf)
        logits[0, [3, 500]] = 0.0
        for case in ("all", "top_p", "top_k of few"):
            params = dataclasses.replace(SamplingParams(), **CASES[case])
            assert sample(logits, [Chunk([0], 0, [0], True, params, [1])])[0].token_id == 500
        assert np.isfinite(sample(logits, [chunk("greedy, logprobs", 1, [1], 0)])[0].logprobs.logprob)
