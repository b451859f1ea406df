"""How much ranks take, reckoned beforehand."""

import json
from dataclasses import replace
from itertools import product

import pytest

from services.engine.pool_memory import pool_pages, ranks_memory, read_config
from services.engine.settings import DEFAULT_KV_PAGES, EngineSettings
from services.values.errors import ConfigError, Unavailable

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
SETTINGS = EngineSettings(model="m", dp_size=2)
RANKS = ranks_memory(SETTINGS, SMALL)


def test_what_a_rank_takes_is_reckoned():
    assert RANKS.page_bytes == 64 * 45 * 1024
    assert RANKS.weights_bytes == pytest.approx(538e6, rel=0.01)
    half = ranks_memory(replace(SETTINGS, dtype="bfloat16"), SMALL)
    assert (half.page_bytes * 2, half.weights_bytes * 2) == (RANKS.page_bytes, RANKS.weights_bytes)


def test_a_draft_model_takes_its_share(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 15}))
    both = ranks_memory(replace(SETTINGS, draft_model=str(tmp_path)), SMALL)
    assert both.page_bytes == RANKS.page_bytes * 3 // 2
    assert both.weights_bytes > 1.5 * RANKS.weights_bytes


def test_windows_and_states_stand_beside_the_pages():
    layers = ["sliding_attention", "full_attention"] * 15
    windowed = ranks_memory(SETTINGS, {**SMALL, "layer_types": layers, "sliding_window": 512})
    assert windowed.page_bytes * 2 == RANKS.page_bytes
    # 64 sequences and what they save: no more than there are pages.
    assert windowed.beside_bytes == 2048 * windowed.page_bytes


@pytest.mark.parametrize(
    ("change", "config"),
    [({"device": "cuda"}, SMALL), ({"engine": "fake"}, SMALL), ({"engine": "sglang"}, SMALL), ({}, {})],
)
def test_of_others_nothing_is_said(change, config):
    assert ranks_memory(replace(SETTINGS, **change), config) is None


def test_of_a_config_with_other_types_nothing_is_said():
    """Whoever loads such a checkpoint says why it does not."""
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


def test_an_unreadable_config_is_for_others_to_refuse(tmp_path):
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


def test_what_is_asked_for_fits_or_is_refused():
    asked = replace(RANKS, kv_pages=2048)
    pool_pages([asked], 32 * GIB, 32 * GIB)
    with pytest.raises(Unavailable, match=r"2 ranks take 13\.8 GiB.*--kv-pages=1\d\d\d would fit"):
        pool_pages([asked], 10 * GIB, 32 * GIB)
    with pytest.raises(ConfigError):
        pool_pages([asked], 10 * GIB, 10 * GIB)
    with pytest.raises(ConfigError, match="take a smaller model"):
        pool_pages([asked], 2 * GIB, 2 * GIB)


def test_those_that_say_nothing_share_what_others_leave():
    said, alone = replace(RANKS, kv_pages=1000), pool_pages([RANKS], 20 * GIB, 20 * GIB)
    assert pool_pages([RANKS, said], 20 * GIB, 20 * GIB) < alone
