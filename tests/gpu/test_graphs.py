"""Every family's steps of single tokens are replayed from CUDA graphs, in half precision, and drafts too."""

import logging

import pytest

from bench.families import FAMILIES
from engine.torch.sequences import Carried, PageTables, Sequence, generate
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = PoolSizes(max_running_requests=6, chunk_size=160)
# Jamba's definition forgets its state. What has never run on a GPU comes first, as the time may be short.
_FIRST = ("llama", "deepseek_v3", "gemma2", "llama4", "qwen3")
REPLAYED = [name for name in dict.fromkeys((*_FIRST, *FAMILIES)) if name != "jamba"]
# Latents, soft caps, windows of both kinds, sinks, and scans of recurrent layers.
OF_PROMPTS = ("deepseek_v3", "gemma2", "llama4", "gpt_oss", "qwen3_5", "falcon_h1", "nemotron_h", "gemma3")


def outputs(device, family, **settings):
    """What three sequences generate, and how many steps were replayed."""
    directory = tiny_checkpoint(family)
    runner = TorchRunner(
        directory, device=device, num_pages=128, page_size=16, sizes=SIZES, dtype="bfloat16", **settings
    )
    tables = PageTables(runner)
    sequences = [
        Sequence(random_prompt(n, seed=n), tables.take(n + 20), size, carried=Carried(tables))
        for n, size in ((5, 1), (131, 65), (90, 21))
    ]
    generate(runner, sequences, 16)
    replayed = runner.steps_by_way.get("graph", 0)
    runner.close()
    return [sequence.output_ids[:16] for sequence in sequences], replayed


@pytest.mark.parametrize("family", OF_PROMPTS)
def test_prompts_are_replayed(device, family, caplog):
    """Each graph's trial compares prompts, beside single tokens or alone, with what is computed anew."""
    caplog.set_level(logging.INFO)
    outputs(device, family, max_rows=4, max_prompt_tokens=65)
    assert "0+65" in caplog.text or device == "cpu", caplog.text
    assert "graph_wrong" not in caplog.text and "graph_refused" not in caplog.text, caplog.text


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5", "nemotron_h"])
def test_drafts_of_recurrent_layers(device, family, caplog):
    """Each graph's trial compares the states that accepted drafts leave."""
    caplog.set_level(logging.INFO)
    outputs(device, family, max_rows=12, max_drafts=2)
    assert "in 4 runs" in caplog.text or device == "cpu", caplog.text
    assert "graph_wrong" not in caplog.text and "graph_refused" not in caplog.text, caplog.text


@pytest.mark.parametrize("family", REPLAYED)
def test_steps_are_replayed(device, family, caplog):
    """Their first tokens are those of steps computed anew; later ones may part where rounding decides."""
    caplog.set_level(logging.INFO)
    replayed, num_replayed = outputs(device, family, max_rows=8)
    anew, none = outputs(device, family)
    assert none == 0
    assert num_replayed > 0 or device == "cpu", caplog.text
    assert "graph_wrong" not in caplog.text and "of=sums" not in caplog.text
    alike = sum(a[:4] == b[:4] for a, b in zip(replayed, anew, strict=True))
    assert alike >= 2, (replayed, anew)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_keys_and_values_of_8_bits(device, family, caplog):
    caplog.set_level(logging.INFO)
    tokens, num_replayed = outputs(device, family, max_rows=8, kv_dtype="fp8_e4m3")
    assert num_replayed > 0 or device == "cpu", caplog.text
    assert "unusable" not in caplog.text and "graph_wrong" not in caplog.text, caplog.text
    assert all(len(own) == 16 for own in tokens)
