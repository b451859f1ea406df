"""Models whose layers see a window: what SGLang keeps whole is a prefix like any other, and what it keeps in
memory of its own is carried, counted, and found again as far as stock SGLang goes.

With window memory of its own SGLang's attention on a CPU reads the wrong slots, so tokens are not compared
there: hits and bytes are.
"""

import asyncio
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, MellumConfig

from bench.families import FAMILIES
from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import PAGE, RANK_FLAGS, SglangCluster
from engine.sglang.settings import sglang_settings
from services.cli.model.make_model import make_model
from services.engine.sglang.service.model_shape import has_window_memory
from services.engine.sglang.service.sglang_settings import KEEP_WHOLE
from services.values.errors import ConfigError
from services.values.rank import Role

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

WINDOW = 32  # tokens, so that SGLang's is 31
ANSWER = 8


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gemma3")
    # Tied, as all that are published: SGLang loads no output layer of its own.
    make_model(directory, FAMILIES["gemma3"], window=WINDOW, changes={"tie_word_embeddings": True})
    return directory


@pytest.fixture(scope="module")
def mellum(tmp_path_factory):
    """In SGLang's list of those with window memory, and the only one that starts on a CPU."""
    directory = tmp_path_factory.mktemp("mellum")
    make_model(directory)  # its tokenizer
    config = MellumConfig(
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        max_position_embeddings=4096,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


async def greedy(directory, ids, max_tokens):
    """By transformers."""

    def generate():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )
        return output[0, len(ids) :].tolist()

    return await asyncio.to_thread(generate)


def pages(tokens):
    return -(-tokens // PAGE)


async def converse(cluster, prompt_lengths, answer=ANSWER):
    """One conversation whose prompts have these lengths: (prompt, answer, usage) of each turn."""
    turns, ids = [], []
    for turn, length in enumerate(prompt_lengths):
        ids = [*ids, *random_ids(length - len(ids), f"turn-{turn}")]
        tokens, finish = await cluster.generate(ids, answer, conversation_id="c")
        turns.append((list(ids), tokens, finish.usage))
        ids = [*ids, *tokens]
    return turns


async def shared_beginnings(cluster):
    """decode_prefix_len of prompts that share 200 tokens and then differ."""
    shared, found = random_ids(200, "shared"), []
    for number in range(4):
        prompt = [*shared, *random_ids(40, f"own-{number}")]
        _, finish = await cluster.generate(prompt, ANSWER)
        found.append(finish.usage.decode_prefix_len)
    return found


def environment(model):
    return sglang_settings(model).environment({})


async def test_sglangs_own_list_says_what_has_window_memory(mellum):
    assert await has_window_memory(str(mellum), environment(mellum))


@pytest.mark.slow
async def test_sglangs_own_list_says_what_has_none_and_of_no_model_anything(gemma, tmp_path):
    assert not await has_window_memory(str(gemma), environment(gemma))
    shutil.copy(gemma / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="does not say"):
        await has_window_memory(str(tmp_path), environment(gemma))


@pytest.mark.slow
async def test_gemma_3_keeps_all_and_answers_as_transformers(gemma, tmp_path):
    """Prompts longer than the window, and prefixes found on decode."""
    async with SglangCluster(gemma, tmp_path, decode_dp_size=1) as cluster:
        layout = (await cluster.registration(Role.DECODE)).layout
        assert len(layout.groups) == 1
        known = 0
        for prompt, tokens, usage in await converse(cluster, (100, 150, 300)):
            assert tokens == await greedy(gemma, prompt, ANSWER)
            assert usage.decode_prefix_len == known // PAGE * PAGE
            assert usage.kv_bytes_moved == pages(usage.delta_tokens) * layout.page_bytes
            known = len(prompt) + ANSWER - 1
        assert await shared_beginnings(cluster) == [0, 192, 192, 192]
        assert KEEP_WHOLE not in cluster.log_path.read_text()


@pytest.mark.slow
async def test_window_memory_is_turned_off_and_beginnings_are_found(mellum, tmp_path):
    async with SglangCluster(mellum, tmp_path, decode_dp_size=1) as cluster:
        assert f"sglang_windows_kept_whole flag={KEEP_WHOLE}" in cluster.log_path.read_text()
        layout = (await cluster.registration(Role.DECODE)).layout
        assert len(layout.groups) == 1
        assert await shared_beginnings(cluster) == [0, 192, 192, 192]
        for prompt, tokens, usage in await converse(cluster, (100, 160)):
            assert tokens == await greedy(mellum, prompt, ANSWER)
            assert usage.kv_bytes_moved == pages(usage.delta_tokens) * layout.page_bytes


@pytest.mark.slow
async def test_window_memory_that_is_asked_for_is_carried_and_counted(mellum, tmp_path):
    flags = (*RANK_FLAGS, "--engine-arg=--swa-full-tokens-ratio=1.0")
    async with SglangCluster(mellum, tmp_path, flags, decode_dp_size=1) as cluster:
        assert "sglang_window_memory said=" in cluster.log_path.read_text()
        layout = (await cluster.registration(Role.DECODE)).layout
        (window,) = layout.carried
        assert (window.window, window.unit_bytes) == (WINDOW, layout.page_bytes)  # two layers of each kind
        known = 0
        for prompt, _, usage in await converse(cluster, (100, 160, 400, 460, 560)):
            # Not even a full hit's: the last window and a page are always fresh.
            cap = (len(prompt) - 1 - (WINDOW - 1)) // PAGE * PAGE
            assert usage.decode_prefix_len == min(known // PAGE * PAGE, cap)
            tail = pages(len(prompt)) - (len(prompt) - (WINDOW - 1)) // PAGE
            due = pages(usage.delta_tokens) * layout.page_bytes + tail * window.unit_bytes
            assert usage.kv_bytes_moved == due
            assert usage.carried_bytes == {"sliding_window": tail * window.unit_bytes}
            known = len(prompt) + ANSWER - 1
        assert await shared_beginnings(cluster) == [0, 0, 0, 0]  # what stock SGLang does
