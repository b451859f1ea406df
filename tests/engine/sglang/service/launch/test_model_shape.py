"""These tests show what is known of a checkpoint before SGLang loads it; the configs are cut down to what
says so."""

import json
import os

import pytest

from exactness.model_configs import GEMMA_3_4B
from services.engine.sglang.service import model_shape
from services.engine.sglang.service.model_shape import ModelShape
from services.values.errors import ConfigError, Unavailable

PLAIN = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536}


def read(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return ModelShape.read(str(folder))


PASSING = {
    "llama": {},
    "mistral without a window": {"sliding_window": None},
    "qwen2, its window switched off": {"sliding_window": 1024, "use_sliding_window": False},
    "qwen2, its window after the last layer": {
        **{"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 4}
    },
    "qwen2, its layers listed": {"sliding_window": 1024, "layer_types": ["full_attention"] * 4},
    "phi3, its window longer than its context": {"sliding_window": 4096},
    "minimax-m2": {"attn_type_list": [1, 1, 1, 1]},
    "granite 4 without mamba": {"layer_types": ["attention"] * 4, "mamba_d_state": 128},
    "deepseek-v3": MLA,
    "deepseek-v3.2": {**MLA, "index_topk": 2048, "layer_types": ["deepseek_sparse_attention"] * 4},
    "a draft head": {"num_nextn_predict_layers": 1},
}


def test_shapes_of_checkpoints(subtests, tmp_path):
    for name, changes in PASSING.items():
        with subtests.test(name):
            assert read(tmp_path, {**PLAIN, **changes}) == ModelShape(2, 64, 4096, 1000, 4096)
    for name, changes in WINDOWED.items():
        with subtests.test(name):
            shape = read(tmp_path, {**PLAIN, **changes})
            assert (shape.is_windowed, shape.is_recurrent) == (True, False)
    for name, changes in RECURRENT.items():
        with subtests.test(name):
            shape = read(tmp_path, {**PLAIN, **changes})
            assert (shape.is_windowed, shape.is_recurrent) == (False, True)


EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA_NET |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
WINDOWED = {
    "mistral": {"sliding_window": 1024},
    "qwen2, its window in use": {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2},
    "gpt-oss": EVERY_OTHER,
    "gemma 3": {"model_type": "gemma3_text", "sliding_window": 1024},
    "llama 4": {"attention_chunk_size": 512},
}
RECURRENT = {
    "qwen3-next": {**DELTA_NET, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "qwen3-next, not listed": {**DELTA_NET, "full_attention_interval": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "falcon-h1": {**MAMBA, "model_type": "falcon_h1"},
    "nemotron-h": {
        **{"hybrid_override_pattern": "M-M*", "ssm_state_size": 128},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16},
    },
}


REFUSED = {
    "jamba": ({"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16}, "mamba_d_state"),
    "falcon-mamba": ({"state_size": 16}, "state_size, and what state_size comes to"),
    "recurrent-gemma": (
        {"block_types": ["recurrent", "attention"]},
        "block_types: recurrent; .* size of a recurrent layer's state",
    ),
    "qwen3-next, its sizes left out": (
        {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
        "layer_types: linear_attention; .* size of a recurrent layer's state",
    ),
    "zamba2, its sizes left out": (
        {"layers_block_type": ["mamba", "hybrid"] * 2},
        "layers_block_type: hybrid, mamba",
    ),
    "gpt-oss, its window left out": (
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "no sliding_window",
    ),
    "kimi-linear": ({**MLA, "linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config"),
    "minimax-text-01": ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list: 0"),
    "mimo-v2": ({"hybrid_layer_pattern": [1, 1, 1, 0], "sliding_window": 128}, "hybrid_layer_pattern"),
    "deepseek-v4": ({"compress_ratios": [0, 4, 128, 4], "sliding_window": 128}, "compress_ratios"),
    "gemma 4": (
        {**EVERY_OTHER, "global_head_dim": 128},
        "2 KV heads of 64 beside 2 KV heads of 128",
    ),
    "a state of which nothing is said": ({"ssm_state_size": 4}, "not which layers"),
}


def test_layers_of_which_too_little_is_known_are_refused_with_what_says_so(subtests, tmp_path):
    for name, (changes, said) in REFUSED.items():
        with (
            subtests.test(name),
            pytest.raises(ConfigError, match=f"no model for --engine=sglang: its config.json says .*{said}"),
        ):
            read(tmp_path, {**PLAIN, **changes})


def test_what_a_config_says_elsewhere_counts(subtests, tmp_path):
    with subtests.test("stretched angles lengthen the context"):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
        shape = read(tmp_path, {**PLAIN, "rope_scaling": yarn})
        assert (shape.max_position_embeddings, shape.max_context_tokens) == (4096, 8192)
    with subtests.test("of a multimodal model the text part counts"):
        vision = {"window_size": 112, "sliding_window": 112}
        assert read(tmp_path, {"text_config": PLAIN, "vision_config": vision, **vision})
        assert not read(tmp_path, {"text_config": PLAIN, **vision}).is_windowed
        assert read(tmp_path, {"text_config": {**PLAIN, "sliding_window": 1024}}).is_windowed
    with subtests.test("what published gemma 3 leaves out is known"):
        shape = read(tmp_path, GEMMA_3_4B)
        assert (shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (4, 256, 262_208)
        assert (shape.max_context_tokens, shape.is_windowed) == (131_072, True)


def test_a_config_that_is_missing_or_wrong_is_refused(subtests, tmp_path):
    with (
        subtests.test("a config that is not there is refused"),
        pytest.raises(ConfigError, match=r"config\.json"),
    ):
        ModelShape.read(str(tmp_path))
    for config in [
        [],
        {},
        {**PLAIN, "layer_types": 4},
        {**PLAIN, "max_position_embeddings": None},
        {**PLAIN, "num_attention_heads": 0},
        {**PLAIN, "vocab_size": float("inf")},
    ]:
        with subtests.test(config=config), pytest.raises(ConfigError, match="cannot be used"):
            read(tmp_path, config)
    with subtests.test("a model type that disagrees with the architecture is refused"):
        names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen2"}
        with pytest.raises(ConfigError, match="Qwen3ForCausalLM is of model_type 'qwen3', not 'qwen2'"):
            read(tmp_path, {**PLAIN, **names})
        assert read(tmp_path, {**PLAIN, **names, "architectures": ["NotOneOfOurs"]})


async def test_who_is_asked_about_windows_may_end_without_an_answer(subtests, tmp_path, monkeypatch):
    for code, error in [
        ("import os; os.kill(os.getpid(), 9)", Unavailable),  # memory was short: another start may do
        ("raise KeyError('architectures')", ConfigError),
        ("print('maybe')", ConfigError),
    ]:
        with subtests.test(code=code, error=error):
            (tmp_path / "asked.py").write_text(code)
            monkeypatch.setattr(model_shape, "_WINDOW_MODULE", "asked")
            with pytest.raises(error, match="windows"):
                await model_shape.has_window_memory("m", {**os.environ, "PYTHONPATH": str(tmp_path)})
