"""Each rule against an oracle that sorts and loops, then chance itself."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.paged.model_runner import NO_TOKEN, Chunk
from services.engine.torch.sampling.torch_sampler import sample, uniform
from services.values.request import SamplingParams

VOCAB_SIZE = 24
GREEDY = SamplingParams(temperature=0)


def chunk(sampling, history=(1,), num_output_ids=0, eos_token_ids=()):
    return Chunk([0], 0, [0], True, sampling, history, num_output_ids, eos_token_ids)


def choose(logits, *args, **kwargs):
    [sampled] = sample(torch.tensor([logits]), [chunk(*args, **kwargs)])
    return sampled


def expected_logits(logits, chunk):
    params = chunk.sampling
    adjusted = [float(x) for x in logits]
    for token_id, bias in params.logit_bias:
        adjusted[token_id] += bias
    for token_id in set(chunk.history):
        penalty = params.repetition_penalty
        adjusted[token_id] *= penalty if adjusted[token_id] <= 0 else 1 / penalty
    output_ids = chunk.history[len(chunk.history) - chunk.num_output_ids :]
    for token_id, count in Counter(output_ids).items():
        adjusted[token_id] -= count * params.frequency_penalty + params.presence_penalty
    if chunk.num_output_ids < params.min_tokens:
        for token_id in params.stop_token_ids + (() if params.ignore_eos else chunk.eos_token_ids):
            adjusted[token_id] = -math.inf
    for *before, last in params.bad_token_ids:
        if output_ids[max(0, len(output_ids) - len(before)) :] == before:
            adjusted[last] = -math.inf
    return adjusted


def expected_probabilities(logits, chunk):
    """Return what may be chosen and with which probability, by token id."""
    params = chunk.sampling
    adjusted = expected_logits(logits, chunk)
    ranked = sorted(range(len(adjusted)), key=lambda i: (-adjusted[i], i))
    weight = {i: math.exp((adjusted[i] - adjusted[ranked[0]]) / params.temperature) for i in ranked}
    ranked = ranked[: params.top_k or None]
    total, held, nucleus = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if params.top_p == 1 or held < params.top_p * total:
            nucleus.append(i)
        held += weight[i]
    left = [i for i in nucleus if weight[i] >= params.min_p]
    total = sum(weight[i] for i in left)
    return {i: weight[i] / total for i in sorted(left)}


def expected_token(logits, chunk):
    if chunk.sampling.greedy:
        adjusted = expected_logits(logits, chunk)
        return adjusted.index(max(adjusted))
    point, held = uniform(chunk.sampling.seed, len(chunk.history)), 0.0
    probabilities = expected_probabilities(logits, chunk)
    for token_id, probability in probabilities.items():
        held += probability
        if point < held:
            return token_id
    return max(i for i, p in probabilities.items() if p > 0)


# Quarters: sums and products are exact enough that oracle and code break ties alike, and ties are common.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
TOKEN_ID = st.integers(0, VOCAB_SIZE - 1)


BAD = st.lists(TOKEN_ID, min_size=1, max_size=3).map(tuple)


def endings_of(history):
    """Banned sequences whose first ids the history ends with."""
    ends = st.integers(0, 3).map(lambda count: tuple(history[len(history) - count :]))
    return st.tuples(ends, TOKEN_ID).map(lambda pair: (*pair[0], pair[1]))


@st.composite
def chunks(draw):
    history = draw(st.lists(TOKEN_ID, min_size=1, max_size=30))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0, 0.3, 1, 2.5])),
        top_p=draw(st.sampled_from([1, 0.9, 0.437, 0.01])),
        top_k=draw(st.sampled_from([0, 1, 3, 100])),
        min_p=draw(st.sampled_from([0, 0.013, 0.51, 1])),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_token_ids=tuple(draw(st.lists(TOKEN_ID, max_size=3))),
        ignore_eos=draw(st.booleans()),
        frequency_penalty=draw(st.sampled_from([0, 0.5, -1])),
        presence_penalty=draw(st.sampled_from([0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1, 2, 0.5])),
        logprobs=draw(st.sampled_from([None, 0, 4])),
        logit_bias=tuple(draw(st.dictionaries(TOKEN_ID, st.sampled_from([-100, -2.5, 3, 100]))).items()),
        bad_token_ids=tuple(draw(st.lists(st.one_of(BAD, endings_of(history)), max_size=5))),
    )
    eos_token_ids = tuple(draw(st.lists(TOKEN_ID, max_size=2)))
    return chunk(sampling, history, draw(st.integers(0, len(history))), eos_token_ids)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(LOGITS, chunks()), min_size=1, max_size=4))
def test_every_choice_is_the_oracles_whoever_shares_the_batch(rows):
    logits = torch.tensor([row for row, _ in rows])
    got = sample(logits, [c for _, c in rows])
    assert [s.token_id for s in got] == [expected_token(row, c) for row, c in rows]
    assert got == [sample(logits[i : i + 1], [c])[0] for i, (_, c) in enumerate(rows)]


def test_ties_and_extremes(subtests):
    with subtests.test("greedy takes the lowest of equal ids in one batch and alone"):
        row = [0.0, 3.0, 1.0, 3.0]
        assert choose(row, GREEDY).token_id == 1
        assert choose(row, dataclasses.replace(GREEDY, presence_penalty=1), [0]).token_id == 1
        assert [s.token_id for s in sample(torch.tensor([row, row[::-1]]), [chunk(GREEDY)] * 2)] == [1, 0]
    for broken in [math.nan, math.inf]:
        with subtests.test("logits that overflowed fail nobody else", broken=broken):
            hot = SamplingParams(temperature=1, top_p=0.9, seed=1)
            rows = torch.tensor([[1.0, broken, 0.0], [0.0, 1.0, 90.0]])
            assert [sampled.token_id for sampled in sample(rows, [chunk(hot)] * 2)] == [1, 2]
    with subtests.test("tiny temperature neither overflows nor strays"):
        assert choose([-1e4, 1e4, 0.0], SamplingParams(temperature=1e-6)).token_id == 1


def test_log_probabilities(subtests):
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        with subtests.test("logprobs are of the raw logits", dtype=dtype):
            logits = torch.tensor([[0.5, 2.0, -1.0, 2.0]], dtype=dtype)
            params = SamplingParams(temperature=0, logprobs=3, repetition_penalty=100)
            [got] = sample(logits, [chunk(params, history=[1, 3])])
            expected = logits[0].double().log_softmax(0).tolist()
            assert got.token_id == 0  # 2.0 has been penalized to 0.02
            assert got.logprobs.token_id == 0
            assert got.logprobs.logprob == pytest.approx(expected[0])
            assert [token_id for token_id, _ in got.logprobs.top] == [1, 3, 0]
            assert [logprob for _, logprob in got.logprobs.top] == pytest.approx(
                [expected[i] for i in (1, 3, 0)]
            )
    with subtests.test("logprobs are of the logits before biases and bans"):
        params = SamplingParams(temperature=0, logprobs=2, logit_bias=((0, 9.0),), bad_token_ids=((1,),))
        got = choose([0.5, 2.0, 1.0], params)
        expected = torch.tensor([0.5, 2.0, 1.0]).double().log_softmax(0).tolist()
        assert got.token_id == got.logprobs.token_id == 0
        assert got.logprobs.logprob == pytest.approx(expected[0])
        assert [token_id for token_id, _ in got.logprobs.top] == [1, 2]
    with subtests.test("logprobs zero is the chosen token only"):
        assert choose([0.0, 1.0], dataclasses.replace(GREEDY, logprobs=0)).logprobs.top == ()
        assert choose([0.0, 1.0], GREEDY).logprobs is None


def test_bans_and_min_tokens(subtests):
    for temperature in [0, 1]:
        with subtests.test(
            "where all is banned no token is chosen and nobody else minds", temperature=temperature
        ):
            params = SamplingParams(temperature=temperature, seed=1)
            barred = dataclasses.replace(params, bad_token_ids=((0,), (1, 0), (1,), (2, 2), (2,)))
            logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
            got = sample(logits, [chunk(barred), chunk(params)])
            assert got[0].token_id == NO_TOKEN
            assert got[1] == sample(logits[:1], [chunk(params)])[0]
    with subtests.test("a ban beside min tokens leaves none that would end it"):
        params = SamplingParams(temperature=0, min_tokens=2, bad_token_ids=((1,), (2,)))
        assert choose([1.0, 3.0, 2.0], params, eos_token_ids=(0,)).token_id == NO_TOKEN
    with subtests.test("min tokens holds off eos and stop ids until they are there"):
        params = dataclasses.replace(GREEDY, min_tokens=2, stop_token_ids=(0, 10**6))
        row = [3.0, 2.0, 1.0]
        assert choose(row, params, [1, 1], 1, eos_token_ids=(1,)).token_id == 2
        assert choose(row, params, [1, 1], 2, eos_token_ids=(1,)).token_id == 0
        assert choose(row, dataclasses.replace(params, ignore_eos=True), [1, 1], 1, (1,)).token_id == 1
    for temperature in [0, 1]:
        with subtests.test(
            "where every token would end it one is chosen all the same", temperature=temperature
        ):
            params = SamplingParams(
                temperature=temperature, top_k=1, min_tokens=2, stop_token_ids=(0, 1, 2, 1)
            )
            assert choose([1.0, 3.0, 2.0], params).token_id == 1


def test_numbers_are_uniform_and_choices_follow_the_probabilities(subtests):
    with subtests.test("the uniform number is pinned"):
        # A replayed request must go on with the same tokens on a newer release too.
        assert uniform(0, 0) == pytest.approx(0.8833108082136426, abs=1e-16)
        assert 0 <= uniform(2**64 - 1, 10**6) < 1
    with subtests.test("uniform numbers are uniform over positions and over seeds"):
        for numbers in ([uniform(7, n) for n in range(20_000)], [uniform(n, 7) for n in range(20_000)]):
            counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
            chi_square = ((counts - 1000) ** 2 / 1000).sum()
            assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
            assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    with subtests.test("choices follow the probabilities"):
        logits = torch.linspace(-2, 2, VOCAB_SIZE)
        params = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05)
        num_draws = 4000
        draws = [chunk(dataclasses.replace(params, seed=seed)) for seed in range(num_draws)]
        counts = Counter(s.token_id for s in sample(logits.expand(num_draws, -1), draws))
        expected = expected_probabilities(logits.tolist(), draws[0])
        assert counts.keys() <= expected.keys()
        chi_square = sum((counts[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in expected.items())
        degrees = len(expected) - 1
        assert chi_square < degrees + 4 * math.sqrt(2 * degrees)
    with subtests.test("the same seed and position choose the same and others do not"):
        flat = torch.zeros(1, 1000)
        params = SamplingParams(seed=5)

        def token_at(seed, position):
            [sampled] = sample(flat, [chunk(dataclasses.replace(params, seed=seed), range(position))])
            return sampled.token_id

        assert token_at(5, 9) == token_at(5, 9)
        assert len({token_at(5, position) for position in range(50)}) > 40
        assert len({token_at(seed, 9) for seed in range(50)}) > 40
