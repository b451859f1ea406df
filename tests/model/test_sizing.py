"""Sizes of KV: against hand-made figures of known models, and against counting one token at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.model.sizing import KvShape, Pool, kv_dtype, kv_shape
from services.values.errors import ConfigError

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bfloat16",
}


def test_grouped_heads():
    shape = kv_shape(LLAMA_8B)
    assert shape == KvShape(32, 2 * 8 * 128, 8, "8 KV heads of 128")
    assert shape.token_bytes("bfloat16") == 131_072  # 128 KiB
    assert shape.token_bytes("fp8") == 65_536


def test_a_latent_is_the_same_on_every_gpu():
    shape = kv_shape(DEEPSEEK_V3)
    assert shape.token_bytes("bfloat16") == 61 * 576 * 2 == shape.token_bytes("bfloat16", tp_size=8)


def test_gpus_share_heads_and_never_less_than_one():
    shape = kv_shape(LLAMA_8B)
    assert shape.token_bytes("bfloat16", tp_size=4) == 131_072 // 4
    assert shape.token_bytes("bfloat16", tp_size=16) == 131_072 // 8


def test_head_dim_wins_over_the_division_and_no_kv_heads_means_all():
    shape = kv_shape({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 32})
    assert (shape.num_kv_heads, shape.layer_width) == (4, 2 * 4 * 32)


def test_layers_without_kv_do_not_count_and_windows_are_told():
    kinds = ["linear_attention"] * 3 + ["full_attention", "sliding_attention"]
    shape = kv_shape({**LLAMA_8B, "num_hidden_layers": 5, "layer_types": kinds})
    assert (shape.num_layers, shape.windowed_layers) == (2, 1)


def test_the_text_part_of_a_multimodal_model_counts():
    assert kv_shape({"text_config": LLAMA_8B, "dtype": "float16"}) == kv_shape(LLAMA_8B)
    assert kv_dtype({"text_config": {}, "dtype": "float16"}) == "float16"
    assert kv_dtype({"text_config": {"torch_dtype": "bfloat16"}}) == "bfloat16"


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_config_that_says_too_little_is_refused(missing):
    with pytest.raises(ConfigError, match=missing):
        kv_shape({key: value for key, value in LLAMA_8B.items() if key != missing})


def test_a_type_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="int4"):
        kv_dtype({"dtype": "int4"})
    with pytest.raises(ConfigError, match="None"):
        kv_dtype({})


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 50), st.integers(1, 8), st.integers(0, 2000))
def test_pools_hold_what_they_are_made_for(page_size, context_tokens, conversations, ranks, spare_bytes):
    pool = Pool(3, page_size, context_tokens)
    pages = pool.pages_for(conversations, ranks)
    assert pool.conversations_in(pages) * ranks >= conversations
    if pages > pool.conversation_pages:  # one page less on each rank is too little
        assert pool.conversations_in(pages - 1) * ranks < conversations
    taken = 0
    while taken * page_size < context_tokens:
        taken += 1
    assert pool.conversation_pages == taken
    assert pool.pages_in(pages * pool.page_bytes + spare_bytes % pool.page_bytes) == pages
