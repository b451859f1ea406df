"""In half precision each token is one that rounding explains, by one forward pass of float32 an answer."""

import pytest
import torch

from engine.torch.sequences import Carried, PageTables, Sequence, generate, kv_of
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import check_half_precision, random_prompt
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 24


def answers(device, dtype, directory, damage=lambda kv, pages: None):
    """(prompt, output) of three that share a prefix and one that is alone; prompts in chunks."""
    sizes = PoolSizes(max_running_requests=4, chunk_size=300)
    runner = TorchRunner(directory, device=device, num_pages=256, page_size=16, dtype=dtype, sizes=sizes)
    tables = PageTables(runner)
    prefix = random_prompt(96, seed=1)

    def carried(tails=None):
        return Carried(tables, keeps=True, tails=tails)

    first = Sequence(prefix + random_prompt(9, seed=2), tables.take(150), 64, carried=carried())
    generate(runner, [first], 1)
    sequences = [first, Sequence(random_prompt(300, seed=3), tables.take(330), 128, carried=carried())]
    for seed in (4, 5):
        pages, own = first.pages[:6] + tables.take(60), carried(first.carried.kept_at(96))
        sequences.append(Sequence(prefix + random_prompt(30, seed=seed), pages, 16, start=96, carried=own))
    damage(kv_of(runner), first.pages)
    generate(runner, sequences, NUM_TOKENS)
    return [(tuple(own.ids[: own.prompt_len]), own.output_ids[:NUM_TOKENS]) for own in sequences]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])  # the last one with windows
def test_every_token_is_within_what_rounding_explains(device, architecture, dtype):
    directory = tiny_checkpoint(architecture)
    for prompt, output in answers(device, dtype, directory):
        share = check_half_precision(directory, prompt, output, getattr(torch, dtype))
        print(f"{architecture} {dtype}: {share:.2f} of the bound")


def test_a_lost_page_is_not_within_it(device):
    """The comparison above can fail."""
    directory = tiny_checkpoint("qwen3")
    damaged = answers(device, "float16", directory, lambda kv, pages: kv[pages[2]].zero_())
    with pytest.raises(AssertionError, match="below the best in float32"):
        for prompt, output in damaged:
            check_half_precision(directory, prompt, output, torch.float16)
