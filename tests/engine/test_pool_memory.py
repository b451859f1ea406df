"""These tests show how much ranks take, reckoned beforehand."""

import json
from dataclasses import replace
from itertools import product

import pytest

from services.engine.engine_config import DEFAULT_KV_PAGES, EngineConfig
from services.engine.pool_memory import pool_pages, ranks_memory, read_config
from services.values.errors import ConfigError, Unavailable
from services.values.rank import Role

GIB = 1 << 30
SMALL = {  # SmolLM2-135M
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
SETTINGS = EngineConfig(model="m", dp_size=2)
RANKS = ranks_memory(SETTINGS, SMALL)


def test_chunks_are_long_where_a_gpu_would_be_idle_with_short_ones():
    chunks = {
        (engine, device): EngineConfig(engine=engine, device=device, model="m").chunk_tokens
        for engine in ("torch", "fake")
        for device in ("cpu", "cuda", "cuda:1")
    }
    of_gpus = {("torch", "cuda"): 2048, ("torch", "cuda:1"): 2048}
    assert chunks == dict.fromkeys(chunks, 512) | of_gpus
    assert EngineConfig(model="m", device="cuda", chunk_size=300).limits(Role.PREFILL).chunk_size == 300


def test_what_ranks_take(subtests, tmp_path_factory):
    with subtests.test("what a rank takes is reckoned"):
        assert RANKS.page_bytes == 64 * 45 * 1024
        assert RANKS.weights_bytes == pytest.approx(538e6, rel=0.01)
        half = ranks_memory(replace(SETTINGS, dtype="bfloat16"), SMALL)
        assert (half.page_bytes * 2, half.weights_bytes * 2) == (RANKS.page_bytes, RANKS.weights_bytes)
    with subtests.test("a draft model takes its share"):
        tmp_path = tmp_path_factory.mktemp("own")
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 15}))
        both = ranks_memory(replace(SETTINGS, draft_model=str(tmp_path)), SMALL)
        assert both.page_bytes == RANKS.page_bytes * 3 // 2
        assert both.weights_bytes > 1.5 * RANKS.weights_bytes
    with subtests.test("windows and states stand beside the pages"):
        layers = ["sliding_attention", "full_attention"] * 15
        windowed = ranks_memory(SETTINGS, {**SMALL, "layer_types": layers, "sliding_window": 512})
        assert windowed.page_bytes * 2 == RANKS.page_bytes
        # 64 sequences and what they save: no more than there are pages.
        assert windowed.beside_bytes == 2048 * windowed.page_bytes


def test_of_others_and_of_what_cannot_be_read_nothing_is_said(subtests, tmp_path_factory):
    for change, config in [
        ({"device": "cuda"}, SMALL),
        ({"engine": "fake"}, SMALL),
        ({"engine": "sglang"}, SMALL),
        ({}, {}),
    ]:
        with subtests.test("of others nothing is said", change=change):
            assert ranks_memory(replace(SETTINGS, **change), config) is None
    with subtests.test("of a config with other types nothing is said"):
        # Whoever loads such a checkpoint says why it does not.
        for wrong in (
            {"text_config": []},
            {"text_config": "x"},
            {"text_config": 3},
            {"dtype": ["float32"]},
            {"quantization_config": "x"},
            {"hidden_size": 0},
            {"num_attention_heads": 0},
            {"num_hidden_layers": float("inf")},
            {"vocab_size": float("inf")},
        ):
            assert ranks_memory(SETTINGS, {**SMALL, **wrong}) is None, wrong
        assert ranks_memory(SETTINGS, {**SMALL, "text_config": None}) == RANKS
    with subtests.test("an unreadable config is for others to refuse"):
        tmp_path = tmp_path_factory.mktemp("own")
        assert read_config("") == read_config(str(tmp_path)) == {}
        (tmp_path / "config.json").write_text("[1]")
        assert read_config(str(tmp_path)) == {}


def test_pools_fit_whatever_is_free():
    for count, free_gib in product((1, 2, 3, 8), (2, 4, 8, 16, 22, 64, 512)):
        ranks, free = replace(RANKS, count=count), free_gib * GIB
        try:
            pages = pool_pages([ranks], free, free)
        except ConfigError:
            assert ranks.fixed_bytes + ranks.pool_bytes(16) > free
            continue
        assert 16 <= pages <= DEFAULT_KV_PAGES
        assert ranks.fixed_bytes + ranks.pool_bytes(pages) <= free
        more = ranks.fixed_bytes + 2 * ranks.pool_bytes(pages + 1)
        assert pages in (16, DEFAULT_KV_PAGES) or more > free  # half of what is left, and no less


def test_what_is_asked_for_fits_or_is_refused_and_others_share_the_rest(subtests):
    with subtests.test("what is asked for fits or is refused"):
        asked = replace(RANKS, kv_pages=2048)
        pool_pages([asked], 32 * GIB, 32 * GIB)
        with pytest.raises(Unavailable, match=r"2 ranks take 13\.8 GiB.*--kv-pages=1\d\d\d would fit"):
            pool_pages([asked], 10 * GIB, 32 * GIB)
        with pytest.raises(ConfigError):
            pool_pages([asked], 10 * GIB, 10 * GIB)
        with pytest.raises(ConfigError, match="take a smaller model"):
            pool_pages([asked], 2 * GIB, 2 * GIB)
    with subtests.test("those that say nothing share what others leave"):
        said, alone = replace(RANKS, kv_pages=1000), pool_pages([RANKS], 20 * GIB, 20 * GIB)
        assert pool_pages([RANKS, said], 20 * GIB, 20 * GIB) < alone
