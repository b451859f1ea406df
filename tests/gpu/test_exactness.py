"""Greedy, in float32: token for token what transformers generates on the host, whatever the split."""

import pytest

from engine.torch.sequences import PageTables, Sequence, generate, kv_of
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.cli.model.make_model import ARCHITECTURES
from services.engine.torch.runner import TorchRunner
from services.values.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 24


def make_runner(device, architecture="llama", page_size=16, num_tokens=4096):
    return TorchRunner(
        tiny_checkpoint(architecture), device=device, num_pages=num_tokens // page_size, page_size=page_size
    )


def near_ties(architecture, sequences):
    """Return how many sequences part from transformers at a near tie; any other difference fails."""
    return sum(
        count_near_ties(
            reference_generation(tiny_checkpoint(architecture), tuple(own.ids[: own.prompt_len]), NUM_TOKENS),
            own.output_ids[:NUM_TOKENS],
        )
        for own in sequences
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_and_pages_of_all_sizes(device, architecture, page_size):
    runner = make_runner(device, architecture, page_size)
    tables = PageTables(runner)
    lengths_and_chunks = ((1, 7), (33, 5), (100, 64), (150, 500), (700, 256))
    sequences = [
        Sequence(random_prompt(length, seed=length), tables.take(length + NUM_TOKENS), chunk)
        for length, chunk in lengths_and_chunks
    ]
    generate(runner, sequences, NUM_TOKENS)
    assert near_ties(architecture, sequences) <= 1


@pytest.mark.parametrize("page_size", [16, 64])
def test_readers_of_one_prefix(device, page_size):
    """Twenty share 128 tokens, three of them 256; prompts join beside single tokens."""
    runner = make_runner(device, page_size=page_size, num_tokens=8192)
    tables = PageTables(runner)
    outer, inner = random_prompt(128, seed=1), random_prompt(128, seed=2)
    first = Sequence(outer + inner + random_prompt(5, seed=3), tables.take(300), 64)
    generate(runner, [first], 1)
    pages = first.pages
    sequences = [first]
    for i in range(20):
        shared = 256 if i < 3 else 128
        prompt = (outer + inner)[:shared] + random_prompt(1 + 7 * i % 40, seed=100 + i)
        own = tables.take(len(prompt) - shared + NUM_TOKENS)
        sequences.append(Sequence(prompt, pages[: shared // page_size] + own, 16, start=shared))
    generate(runner, sequences, NUM_TOKENS)
    assert near_ties("llama", sequences) <= 1


def test_what_is_sampled_does_not_depend_on_the_batch(device):
    prompt = random_prompt(60, seed=3)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11)

    def sampled(*others):
        runner = make_runner(device)
        tables = PageTables(runner)
        beside = [Sequence(random_prompt(n, seed=n), tables.take(n + 30), 16) for n in others]
        sequence = Sequence(prompt, tables.take(100), 13, sampling=params)
        generate(runner, [*beside, sequence], 20)
        return sequence.output_ids[:20]

    assert sampled() == sampled(5, 40, 61)


def test_a_lost_page_is_seen(device):
    """The comparisons above can fail."""
    prompt = random_prompt(150, seed=150)

    def output_after(damage):
        runner = make_runner(device)
        sequence = Sequence(prompt, PageTables(runner).take(180), 150)
        generate(runner, [sequence], 1)
        damage(kv_of(runner), sequence.pages)
        generate(runner, [sequence], NUM_TOKENS)
        return sequence.output_ids

    undamaged = output_after(lambda kv, pages: None)
    for page in (0, 4, 8):
        assert output_after(lambda kv, pages, page=page: kv[pages[page]].zero_()) != undamaged
