"""Layers keep what is known of models, and what transformers' own caches hold; others are refused."""

import pytest
import torch
import transformers

from exactness import model_configs as known
from services.model.layer_groups import AttentionGroup, layer_groups
from services.values.errors import ConfigError
from services.values.kv import GroupKind

FULL, SLIDING, CHUNKED = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW
MIB = 2**20

# Bytes of a token, of windowed layers' token, MiB of a state; bfloat16. Of hybrids section by section:
# layers with full attention x KV heads x 2 x head_dim x 2 bytes.
FIGURES = {
    "llama": (known.LLAMA_3_1_8B, 32 * 8 * 256 * 2, 0, 0),
    "deepseek_v3": (known.DEEPSEEK_V3, 61 * 576 * 2, 0, 0),
    "qwen3_5_moe": (known.QWEN3_5_35B_A3B, 20 * 1024, 0, 61.9),
    "qwen3_5": (known.QWEN3_5_9B, 32 * 1024, 0, 49.5),
    "qwen3_next": (known.QWEN3_NEXT, 24 * 1024, 0, 74.2),
    "falcon_h1": (known.FALCON_H1, 128 * 1024, 0, 32.4),
    "nemotron_h": (known.NEMOTRON_H, 4 * 8 * 256 * 2, 0, 27 * (128 * 80 * 128 * 4 + 12288 * 4 * 2) / MIB),
    "gpt_oss": (known.GPT_OSS_120B, 18 * 8 * 128 * 2, 18 * 8 * 128 * 2, 0),
    "gemma3": (known.GEMMA_3_4B, 5 * 4 * 512 * 2, 29 * 4 * 512 * 2, 0),
    "mistral": (known.MISTRAL_7B, 32 * 8 * 256 * 2, 0, 0),
    "qwen3_moe": (known.QWEN3_30B_A3B, 48 * 4 * 256 * 2, 0, 0),
    "minimax_m2": (known.MINIMAX_M2, 62 * 8 * 256 * 2, 0, 0),
    "llama4": (known.LLAMA_4_SCOUT, 12 * 8 * 256 * 2, 36 * 8 * 256 * 2, 0),
}


def test_known_models_take_what_is_known_of_them(subtests):
    for name, (config, token, windowed, state_mib) in FIGURES.items():
        with subtests.test(name):
            groups = layer_groups(config)
            assert groups.full.token_bytes("bfloat16") == token
            assert sum(window.token_bytes("bfloat16") for window in groups.windows) == windowed
            state = groups.recurrent.state_bytes("bfloat16") if groups.recurrent else 0
            assert state / MIB == pytest.approx(state_mib, abs=0.05)


def test_windows(subtests):
    with subtests.test("windows are those that config json says"):
        assert [(group.kind, group.window) for group in layer_groups(known.GPT_OSS_120B).windows] == [
            (SLIDING, 128)
        ]
        assert [(group.kind, group.window) for group in layer_groups(known.LLAMA_4_SCOUT).windows] == [
            (CHUNKED, 8192)
        ]
        assert layer_groups(known.GEMMA_3_4B).full.layer_ids == (5, 11, 17, 23, 29)
    with subtests.test("where no layer sees all the windowed ones are kept whole"):
        groups = layer_groups(known.MISTRAL_7B)
        assert groups.full == AttentionGroup(FULL, 8, 128, 128, 0, tuple(range(32)))
        assert (groups.masked_window, groups.carries) == (4096, False)


def test_groups_have_sizes(subtests):
    with subtests.test("gpus share heads and never less than one and states"):
        full = layer_groups(known.LLAMA_3_1_8B).full
        assert full.token_bytes("bfloat16", tp_size=4) == 131_072 // 4
        assert full.token_bytes("fp8", tp_size=16) == 131_072 // 2 // 8
        latent = layer_groups(known.DEEPSEEK_V3).full
        assert latent.token_bytes("bfloat16", tp_size=8) == latent.token_bytes("bfloat16")
        recurrent = layer_groups(known.QWEN3_NEXT).recurrent
        assert recurrent.state_bytes("bfloat16", tp_size=4) == recurrent.state_bytes("bfloat16") // 4
    with subtests.test("a convolution has the models type and the rest float32"):
        recurrent = layer_groups(known.QWEN3_5_35B_A3B).recurrent
        half, whole = (recurrent.state_bytes(dtype) for dtype in ("bfloat16", "float32"))
        assert whole - half == 30 * 8192 * 4 * 2
    for dtype in ["float32", "bfloat16"]:
        with subtests.test("a group is a layouts", dtype=dtype):
            (window,) = layer_groups(known.GPT_OSS_120B).windows
            group = window.in_layout(dtype, 64)
            assert (group.kind, group.window, group.dtype, group.v_head_dim) == (SLIDING, 128, dtype, None)
            assert group.unit_bytes == 64 * window.token_bytes(dtype)
            assert layer_groups(known.DEEPSEEK_V3).full.in_layout(dtype, 64).v_head_dim == 0


def test_what_is_unknown_or_missing_is_refused(subtests):
    for missing in ["num_hidden_layers", "num_attention_heads", "hidden_size"]:
        with (
            subtests.test("a config that says too little is refused", missing=missing),
            pytest.raises(ConfigError, match=missing),
        ):
            layer_groups({key: value for key, value in known.LLAMA_3_1_8B.items() if key != missing})
    for changes, said in [
        ({"layer_types": ["full_attention", "telepathy"]}, "'telepathy' is no kind of layer"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding_window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "size of a recurrent layer's state"),
        ({"layer_types": ["linear_attention"], "conv_L_cache": 3}, "and are: none"),
        ({"layer_types": ["full_attention"] * 2, "per_layer_config": {"1": {"head_dim": 8}}}, "be alike"),
    ]:
        with (
            subtests.test("what is not known is refused", changes=changes),
            pytest.raises(ConfigError, match=said),
        ):
            layer_groups(known.LLAMA_3_1_8B | changes)


BASE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
BASE |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"head_dim": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_ssm": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
WINDOW = {"sliding_window": 7}
LINEAR, SEES_ALL, SLIDES = "linear_attention", "full_attention", "sliding_attention"
SHARED = {"shared_expert_intermediate_size": 16}
HYBRID = {**BASE, **HEADS, **DELTA, "num_hidden_layers": 4}
# class of a config, what it is made of; patterns are left to the class where it has one
TINY = {
    "qwen3_5": ("Qwen3_5TextConfig", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", HYBRID | EXPERTS | SHARED),
    "qwen3_next": ("Qwen3NextConfig", HYBRID | EXPERTS | SHARED),
    "nemotron_h": (
        "NemotronHConfig",
        {**BASE, **HEADS, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 8}
        | {"ssm_state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "falcon_h1": ("FalconH1Config", {**BASE, **MAMBA, "num_hidden_layers": 2, "mamba_chunk_size": 8}),
    "lfm2": ("Lfm2Config", {**BASE, "num_hidden_layers": 3, "full_attn_idxs": [1], "conv_L_cache": 3}),
    "gpt_oss": (
        "GptOssConfig",
        {**BASE, **HEADS, **WINDOW, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma2": ("Gemma2Config", {**BASE, **HEADS, **WINDOW, "num_hidden_layers": 3}),
    "gemma3": ("Gemma3TextConfig", {**BASE, **HEADS, **WINDOW, "num_hidden_layers": 7}),
    "gemma4": (
        "Gemma4TextConfig",
        {**BASE, **HEADS, **WINDOW, "num_hidden_layers": 6, "global_head_dim": 32, "num_kv_shared_layers": 0}
        | {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    ),
    "mistral": ("MistralConfig", {**BASE, **WINDOW, "num_hidden_layers": 2}),
    "olmo3": ("Olmo3Config", {**BASE, **WINDOW, "num_hidden_layers": 4}),
    "cohere2": ("Cohere2Config", {**BASE, **WINDOW, "num_hidden_layers": 4}),
    "qwen2, a window from a layer on": (
        "Qwen2Config",
        {**BASE, **WINDOW, "num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**BASE, **HEADS, **EXPERTS, **WINDOW, "num_hidden_layers": 2, "use_sliding_window": False},
    ),
    "minimax_m2": ("MiniMaxM2Config", {**BASE, **HEADS, "num_local_experts": 8, "num_hidden_layers": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**BASE, **LATENT, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**BASE, **HEADS, "attention_chunk_size": 7, "num_hidden_layers": 4, "num_local_experts": 2}
        | {"intermediate_size_mlp": 32},
    ),
}


def made(family):
    """Return what was said, the config that transformers makes of it, and its cache after some tokens."""
    name, said = TINY[family]
    config = getattr(transformers, name)(**said)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model(torch.ones(1, 9, dtype=torch.long), use_cache=True).past_key_values
    return said | {"model_type": config.model_type}, config, cache


QUICK = ("qwen3_5", "falcon_h1", "gpt_oss", "gemma3", "qwen2, a window from a layer on", "deepseek_v3")


def test_groups_are_what_transformers_keeps(subtests):
    for family in QUICK:
        with subtests.test(family):
            check_groups(family)


@pytest.mark.exact
@pytest.mark.parametrize("family", sorted(TINY.keys() - set(QUICK)))
def test_groups_of_every_family_are_what_transformers_keeps(family):
    check_groups(family)


def check_groups(family):
    said, config, cache = made(family)
    groups = layer_groups(said)
    assert groups == layer_groups(config.to_dict())  # as a checkpoint that transformers saved has it
    attention = {layer: group for group in (groups.full, *groups.windows) for layer in group.layer_ids}
    recurrent = groups.recurrent.layer_ids if groups.recurrent else ()
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        assert (keys is not None and keys.numel() > 0) == (index in attention)
        states = [state for name in ("conv_states", "recurrent_states") for state in _states(layer, name)]
        assert bool(states) == (index in recurrent)
        if states:
            assert sum(s.numel() * s.element_size() for s in states) == groups.recurrent.layer.size_bytes(2)
        if index in attention:
            _check_attention(attention[index], layer, groups.masked_window)


def _states(layer, name):
    held = getattr(layer, name, None) or {}
    return [state for state in (held.values() if isinstance(held, dict) else held) if state is not None]


def _check_attention(group, layer, masked_window):
    window = getattr(layer, "sliding_window", None) or 0
    assert (group.window or masked_window) == window
    width = layer.keys.shape[1] * (layer.keys.shape[3] + layer.values.shape[3])
    assert group.token_bytes("bfloat16") == len(group.layer_ids) * width * 2
