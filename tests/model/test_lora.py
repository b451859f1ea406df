"""What an adapter's files say is read as PEFT reads it, and what is not served is refused by name."""

import pytest

from services.model.lora import LoraLayer, lora_layers
from services.values.errors import ConfigError

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
LAYER = "model.layers.10.self_attn.q_proj"


def shapes_of(layer=LAYER, rank=4, prefix="base_model.model."):
    return {f"{prefix}{layer}.lora_A.weight": (rank, 64), f"{prefix}{layer}.lora_B.weight": (32, rank)}


def test_ranks_and_scales(subtests):
    cases = {
        "plain": ({}, 4, 2.0),
        "half of sqrt": ({"use_rslora": True}, 4, 4.0),
        "alpha of its own": ({"alpha_pattern": {"q_proj": 2, "v_proj": 9}}, 4, 0.5),
        "rank of its own": ({"rank_pattern": {r"layers\.1.\.self_attn\.[qk]_proj": 2}}, 2, 4.0),
        "another layer's": ({"rank_pattern": {"1.self_attn.q_proj": 2, "xq_proj": 3}}, 4, 2.0),
        "the first pattern": ({"alpha_pattern": {".*q_proj": 4, "q_proj": 12}}, 4, 1.0),
        "what does not matter": ({"lora_dropout": 0.1, "target_modules": "all-linear"}, 4, 2.0),
    }
    for name, (config, rank, scale) in cases.items():
        with subtests.test(name):
            expected = {LAYER: LoraLayer(rank, 64, 32, scale)}
            assert lora_layers(CONFIG | config, shapes_of(rank=rank)) == expected
            assert lora_layers(CONFIG | config, shapes_of(rank=rank, prefix="")) == expected


def test_what_is_not_served_is_named(subtests):
    for config, shapes, says in [
        ({"peft_type": "LOHA"}, shapes_of(), "only LORA"),
        ({"task_type": "SEQ_CLS"}, shapes_of(), "SEQ_CLS"),
        ({"use_dora": True}, shapes_of(), "use_dora=True is not served"),
        ({"modules_to_save": ["lm_head"]}, shapes_of(), "modules_to_save"),
        ({"trainable_token_indices": [1]}, shapes_of(), "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, shapes_of(), "target_parameters"),
        ({"a_field_of_tomorrow": 1}, shapes_of(), "a_field_of_tomorrow=1"),
        ({"bias": "all"}, shapes_of(), "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, shapes_of(), "pissa"),
        ({"r": None}, shapes_of(), "its r must be a number"),
        ({"r": 8}, shapes_of(), "rank 4 and B of 4; its config tells 8"),
        ({"rank_pattern": {"(": 1}}, shapes_of(), "not a pattern"),
        ({"lora_alpha": float("inf")}, shapes_of(), "its lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, shapes_of(), "its lora_alpha must be a number"),
        ({"rank_pattern": ["a"]}, shapes_of(), "its rank_pattern must be an object"),
        ({}, {}, "no tensors"),
        ({}, {f"{LAYER}.lora_embedding_A": (4, 64)}, "lora_embedding_A is not of a linear"),
        ({}, {f"{LAYER}.lora_magnitude_vector": (4,)}, "not of a linear"),
        ({}, {f"{LAYER}.lora_A.weight": (4, 64)}, "has no lora_B"),
        ({}, {f"{LAYER}.lora_A.weight": (4,)}, "not two dimensions"),
        ({}, shapes_of() | shapes_of(prefix=""), "twice"),
    ]:
        with subtests.test(says, config=config), pytest.raises(ConfigError, match=says.replace("(", r"\(")):
            lora_layers(CONFIG | config, shapes)
