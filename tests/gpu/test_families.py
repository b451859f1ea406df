"""Every family on the device, in float32: states, windows, latents and experts as in transformers; drafts."""

import pytest

from bench.families import FAMILIES
from engine.torch.sequences import Carried, Guessing, PageTables, Sequence, generate, step
from exactness.checkpoints import tiny_checkpoint
from exactness.draft_checkpoints import grown_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.engine.torch.draft import DraftModelSettings
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 16
BORDER = 64
SIZES = PoolSizes(max_running_requests=6, chunk_size=160)
WITH_EXPERTS = (
    *("gpt_oss", "minimax_m2", "nemotron_h", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "llama4", "gemma4"),
)
SERVED = [name for name in FAMILIES if name != "jamba"]  # whose definition forgets its state


def runner_of(device, family):
    """As a rank starts it: with its checks of the model and of the kernel."""
    directory = tiny_checkpoint(family)
    return TorchRunner(directory, device=device, num_pages=128, page_size=16, sizes=SIZES, max_rows=8)


def assert_replayed(device, family, runner):
    """Latents are gathered, and experts in float32 wait for the device: these are not replayed."""
    if device != "cpu" and family not in ("deepseek_v3", *WITH_EXPERTS):
        assert runner.steps_by_way["graph"] > 0


def near_ties(directory, sequence):
    """Return how many tokens part from transformers at a near tie; any other difference fails."""
    prompt = tuple(sequence.ids[: sequence.prompt_len])
    output = sequence.output_ids[:NUM_TOKENS]
    return count_near_ties(reference_generation(directory, prompt, NUM_TOKENS), output)


@pytest.mark.parametrize("family", SERVED)
def test_greedy_output_is_that_of_transformers(device, family):
    """In chunks of several sizes; then one goes on from pages, tails and a copied state of another's."""
    runner = runner_of(device, family)
    tables = PageTables(runner)
    sequences = [
        Sequence(random_prompt(n, seed=n), tables.take(n + NUM_TOKENS), size, carried=Carried(tables))
        for n, size in ((5, 1), (131, 65), (90, 21))
    ]
    first, resumed = resume(runner, tables)
    generate(runner, [*sequences, first, resumed], NUM_TOKENS)
    assert_replayed(device, family, runner)
    directory = tiny_checkpoint(family)
    assert sum(bool(near_ties(directory, each)) for each in [*sequences, first, resumed]) <= 1


def resume(runner, tables):
    """One that has computed BORDER tokens, and one that goes on there."""
    prompt = random_prompt(100, seed=7)
    first = Sequence(prompt, tables.take(120), 32, carried=Carried(tables, keeps=True))
    while first.start < BORDER:
        step(runner, [first])
    carried = Carried(tables, keeps=True, tails=first.carried.kept_at(BORDER))
    pages = [*first.pages[: BORDER // 16], *tables.take(120 - BORDER)]
    if carried.slot is not None:
        runner.copy_slots([(first.carried.slot, carried.slot)])
    return first, Sequence(prompt, pages, 32, start=BORDER, carried=carried)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "falcon_h1", "deepseek_v3"])
def test_drafts_change_nothing(device, family):
    """Right, wrong and half right ones, side by side."""
    runner = runner_of(device, family)
    directory = tiny_checkpoint(family)
    tables = PageTables(runner)
    sequences = []
    for length, num_right in ((40, 3), (17, 0), (33, 1)):
        prompt = random_prompt(length, seed=length)
        expected = reference_generation(directory, prompt, NUM_TOKENS + 4).token_ids

        def guess(done, expected=expected, num_right=num_right):
            ids = expected[done : done + 3]
            return [token if i < num_right else (token + 1) % 512 for i, token in enumerate(ids)]

        pages = tables.take(length + NUM_TOKENS + 10)
        sequences.append(Guessing(prompt, pages, 13, carried=Carried(tables, keeps=True), guess=guess))
    generate(runner, sequences, NUM_TOKENS)
    assert sum(bool(near_ties(directory, each)) for each in sequences) <= 1
    assert max(sequences[0].step_sizes) == 4
    assert max(sequences[1].step_sizes) == 1


def test_a_small_model_drafts_what_comes_true(device):
    draft = DraftModelSettings(tiny_checkpoint(), max_rows=4)
    directory = grown_checkpoint()
    runner = TorchRunner(directory, device=device, num_pages=64, page_size=16, draft=draft, max_rows=8)
    tables = PageTables(runner)
    prompt = random_prompt(60, seed=60)
    pages = tables.take(60 + NUM_TOKENS + 10)
    runner.draft.lent(pages)

    def propose(_done):
        [drafts] = runner.draft.propose([Sequence.next_chunk(sequence)], [3])
        return list(drafts)

    sequence = Guessing(prompt, pages, 20, carried=Carried(tables), guess=propose)
    generate(runner, [sequence], NUM_TOKENS)
    assert near_ties(grown_checkpoint(), sequence) <= 1
    assert sum(sequence.step_sizes) / len(sequence.step_sizes) > 2
