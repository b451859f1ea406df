"""Steps that verify drafts choose, and leave behind, what plain decoding does: to the bit."""

import random
from functools import cache

import pytest
import torch

from engine.torch.sequences import GREEDY, Carried, Guessing, PageTables, kv_of, step
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt
from services.engine.paged.model_runner import Chunk
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes
from services.values.errors import ProtocolError
from services.values.request import SamplingParams

# Full attention, a window, chunks, a delta net, Mamba-2 beside attention in each layer.
FAMILIES = ["llama", "gemma3", "llama4", "qwen3_5", "falcon_h1"]
RECURRENT = ["qwen3_5", "falcon_h1"]
# The first two are tried by default as whole engines, in paired/test_speculation.py.
TRIED_ELSEWHERE = ("gemma3", "qwen3_5", "llama4")
ROUNDED = ["llama4"]  # torch's product of experts gives a row other bits in another batch
SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    seed=5,
    logprobs=3,
    min_tokens=12,
    stop_token_ids=tuple(range(200)),
)
PROMPTS = {"right": (40, GREEDY), "wrong": (17, SAMPLED), "half": (5, SAMPLED), "any": (33, GREEDY)}
MAX_TOKENS = 24


@cache
def runner_of(family):
    """One for all tests: its pools hold what others have left there."""
    sizes = PoolSizes(max_running_requests=6, chunk_size=64)
    return TorchRunner(tiny_checkpoint(family), num_pages=96, page_size=16, sizes=sizes, self_check=False)


def sequence(runner, tables, length, sampling, **how):
    pages = tables.take(length + MAX_TOKENS + 10)
    carried = Carried(tables, keeps=True)
    prompt = random_prompt(length, seed=length)
    return Guessing(prompt, pages, 13, sampling=sampling, carried=carried, **how)


def run(runner, sequences):
    """Step until each has MAX_TOKENS; note their states on the way."""
    joined = 0
    while any(len(each.choices) < MAX_TOKENS for each in sequences):
        joined += 1
        step(runner, [each for each in sequences[:joined] if len(each.choices) < MAX_TOKENS])
        for each in sequences:
            each.states[each.start] = state_of(runner, each)


def state_of(runner, of):
    slots = runner._pools.slots
    return b"" if slots is None else bytes(next(slots.read_slots([of.carried.slot])))


@cache
def plain(family, length, sampling):
    """One that is decoded alone, token by token."""
    runner = runner_of(family)
    alone = sequence(runner, PageTables(runner, seed=length), length, sampling)
    run(runner, [alone])
    return alone, kv_before(runner, alone)


def kv_before(runner, of):
    kv = kv_of(runner)[of.pages].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
    return kv[: of.start].clone()


def guesses(kind, expected, chance):
    """Drafts of a kind, by what is to come."""

    def guess(num_output):
        right = list(expected[num_output : num_output + chance.randrange(1, 7)])
        wrong = [token_id ^ 1 for token_id in right]
        cut = {"right": len(right), "wrong": 0, "half": len(right) // 2}.get(
            kind, chance.randrange(len(right) + 1)
        )
        return right[:cut] + wrong[cut:]

    return guess


def check_as_plain(family, runner, guessing, length, sampling):
    alone, kv = plain(family, length, sampling)
    if family in ROUNDED:
        assert_near(guessing.choices[:MAX_TOKENS], alone.choices[:MAX_TOKENS])
        return
    assert guessing.choices[:MAX_TOKENS] == alone.choices[:MAX_TOKENS]
    shared = min(alone.start, guessing.start)
    assert torch.equal(kv_before(runner, guessing)[:shared], kv[:shared])
    both = guessing.states.keys() & alone.states.keys()
    assert len(both) > 3
    assert [guessing.states[at] for at in both] == [alone.states[at] for at in both]


def assert_near(choices, expected):
    assert [choice.token_id for choice in choices] == [choice.token_id for choice in expected]
    logprobs = [[each.logprobs.logprob for each in both if each.logprobs] for both in (choices, expected)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def verified(family, kinds=tuple(PROMPTS), seed=0):
    """Verify them beside each other, a prompt in small chunks, and one that has no drafts."""
    runner = runner_of(family)
    tables, chance = PageTables(runner, seed), random.Random(seed)
    sequences = []
    for kind in kinds:
        length, sampling = PROMPTS[kind]
        expected = [choice.token_id for choice in plain(family, length, sampling)[0].choices]
        guess = guesses(kind, expected, chance)
        sequences.append(sequence(runner, tables, length, sampling, guess=guess))
    others = [sequence(runner, tables, n, GREEDY) for n in (50, 1)]
    run(runner, [*sequences, *others])
    return runner, dict(zip(kinds, sequences, strict=True)), others


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.exact if each in TRIED_ELSEWHERE else ()) for each in FAMILIES],
)
def test_whatever_the_drafts_choices_and_states_are_those_of_plain_decoding(family):
    runner, sequences, others = verified(family)
    for kind, guessing in sequences.items():
        check_as_plain(family, runner, guessing, *PROMPTS[kind])
    for other, length in zip(others, (50, 1), strict=True):
        check_as_plain(family, runner, other, length, GREEDY)
    sizes = {kind: guessing.step_sizes[4:-1] for kind, guessing in sequences.items()}
    assert min(sizes["right"]) >= 2
    assert set(sizes["wrong"]) == {1}
    assert 1 < max(sizes["half"]) < max(sizes["right"])


def test_drafts_stand_behind_one_token_and_that_is_the_newest(subtests):
    for num_drafts, sample in [(1, True), (2, False)]:
        with subtests.test(num_drafts=num_drafts):
            chunk = Chunk([1, 2, 3], 0, [0], sample, GREEDY, [1], num_drafts=num_drafts)
            with pytest.raises(ProtocolError, match="drafts"):
                runner_of("llama").run([chunk])
