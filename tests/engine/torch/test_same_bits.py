"""A CPU computes a request to the same bits, whoever else is in its steps."""

import pytest
import torch

from engine.torch.bits import num_parted, recorded_logits, runner_of
from engine.torch.sequences import Carried, Guessing, PageTables, step
from exactness.reference import random_prompt
from services.engine.torch.model import activations
from services.values.request import SamplingParams

SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, logprobs=3, seed=5)
PROMPT = random_prompt(131, seed=1)
MAX_TOKENS = 7
# Others beside it: (prompt tokens that they share with it, own ones, tokens a chunk, drafts a step)
OTHERS = ((0, 5, 5, 0), (64, 30, 33, 2), (128, 40, 160, 0), (0, 17, 3, 5), (96, 60, 160, 1))
ATTENTION = [("llama", "float32"), ("gemma3", "float32")]
RECURRENT = [("falcon_h1", "float32")]
MORE_ATTENTION = [
    ("llama", "bfloat16"),
    ("gemma3", "bfloat16"),
    ("gemma4", "float32"),
    ("gemma4", "bfloat16"),
]
MORE_RECURRENT = [
    ("falcon_h1", "bfloat16"),
    ("qwen3_5", "float32"),
    ("qwen3_5", "bfloat16"),
    ("bamba", "float32"),
    ("bamba", "bfloat16"),
]


@pytest.fixture
def logits(monkeypatch):
    return recorded_logits(monkeypatch)


def alone(runner, chunk_size):
    request = sequence(PageTables(runner), PROMPT, chunk_size)
    generate(runner, [request])
    return request.ids[: len(PROMPT) + MAX_TOKENS]


def beside_others(runner, chunk_size, expected=()):
    """Its drafts are the `expected` ids, and then a wrong one.

    The others join one after the other; those that share a prefix read its pages, where there is no state.
    """
    tables = PageTables(runner, seed=1)
    request = sequence(tables, PROMPT, chunk_size, guess=lambda n: guessed(expected, n))
    others = [joining(tables, request, *other) for other in OTHERS]
    while request.start < len(PROMPT):
        step(runner, [request, *(each for each in others if each.start == 0 or each.output_ids)])
    generate(runner, [request, *others])
    assert max(request.step_sizes) == (4 if expected else 1)
    return request.ids[: len(PROMPT) + MAX_TOKENS]


def joining(tables, request, num_shared, num_own, chunk_size, num_drafts):
    ids = PROMPT[:num_shared] + random_prompt(num_own, seed=num_own)
    other = sequence(tables, ids, chunk_size, guess=lambda n: list(range(n, n + num_drafts)))
    if tables.slots is None:
        other.pages[: num_shared // 16], other.start = request.pages[: num_shared // 16], num_shared
    return other


def guessed(expected, num_output):
    """2 or 3 right ones, and the last is wrong."""
    right = list(expected[len(PROMPT) + num_output :][: 2 + num_output % 2])
    return [*right, (right[-1] + 1) % 100] if right else []


def sequence(tables, ids, chunk_size, **how):
    pages = tables.take(len(ids) + 40)
    return Guessing(ids, pages, chunk_size, sampling=SAMPLING, carried=Carried(tables), **how)


def generate(runner, sequences):
    while going_on := [each for each in sequences if len(each.output_ids) < MAX_TOKENS]:
        step(runner, going_on)


def check(logits, runner, cuts):
    """The request, its prompt computed in chunks of these sizes."""
    ids = alone(runner, 128)
    runs = [alone(runner, size) for size in cuts]
    runs += [beside_others(runner, 128), beside_others(runner, 64, ids)]
    assert runs == [ids] * len(runs)
    assert num_parted(logits, ids, len(PROMPT), 1 + len(runs)) == 0


def test_a_request_gets_the_same_bits_beside_others(subtests):
    for family, dtype in ATTENTION:
        with (
            subtests.test(
                "attention alone gives the same bits beside others and however it is cut", family=family
            ),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            logits = recorded_logits(monkeypatch)
            check(logits, runner_of(family, dtype), cuts=[160, 7])
    # And where chunks of its prompt end at other ones of the scans' borders.
    for family, dtype in RECURRENT:
        with (
            subtests.test("recurrent layers give the same bits beside others", family=family),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            logits = recorded_logits(monkeypatch)
            check(logits, runner_of(family, dtype), cuts=[64, 192])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield 2
    torch.set_num_threads(before)
    runner_of.cache_clear()  # the others are for one thread


@pytest.mark.exact
@pytest.mark.parametrize(("family", "dtype"), ATTENTION + MORE_ATTENTION + RECURRENT + MORE_RECURRENT)
def test_two_threads_and_other_types_give_the_same_bits_too(family, dtype, two_threads, logits):
    is_recurrent = (family, dtype) in RECURRENT + MORE_RECURRENT
    check(logits, runner_of(family, dtype, two_threads), cuts=[64, 192] if is_recurrent else [160, 7])


def test_experts_round_by_what_else_they_compute(logits):
    """Products of their rows are torch's own."""
    runner = runner_of("qwen3_moe")
    ids = alone(runner, 50)
    assert beside_others(runner, 50) == ids
    rows = [logits[tuple(ids[:end])] for end in range(len(PROMPT), len(ids))]
    assert 0 < max((alone - beside).abs().max() for alone, beside in rows) < 2e-4


def test_an_activation_that_ends_otherwise_is_noticed(logits, monkeypatch):
    """Were what threads and vectors leave over computed by another formula."""
    monkeypatch.setattr(activations, "even_size", lambda size, num_threads: size)
    runner = runner_of("falcon_h1")
    ids = alone(runner, 50)
    beside_others(runner, 50)
    assert num_parted(logits, ids, len(PROMPT), 2) > 0
