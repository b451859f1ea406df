from itertools import product

import pytest

from services.model.model_config import context_tokens

QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# max_position_embeddings, how angles are stretched, the context
FORMS = {
    "plain": (4096, None, 4096),
    "default": (4096, {"rope_type": "default", "rope_theta": 1e4}, 4096),
    "Qwen3 as its documentation stretches it": (40960, QWEN3, 131072),
    "Qwen2.5 likewise": (32768, QWEN3, 131072),
    "already the stretched length": (131072, QWEN3, 131072),
    "DeepSeek-V3": (163840, {**QWEN3, "factor": 40, "original_max_position_embeddings": 4096}, 163840),
    "a factor lowered, as Qwen's documentation advises": (131072, {**QWEN3, "factor": 2.0}, 65536),
    "type by its old name": (40960, {"type": "yarn", **dict(list(QWEN3.items())[1:])}, 131072),
    "yarn without an original length": (4096, {"rope_type": "yarn", "factor": 4.0}, 16384),
    "yarn without a factor": (16384, {**QWEN3, "factor": None}, 16384),
    "no whole number": (40960, {**QWEN3, "factor": 1.3}, 42598),
    "Llama 3.1": (131072, LLAMA3, 131072),
    "vicuna-16k": (4096, {"type": "linear", "factor": 4.0}, 16384),
    "linear, the stretched length stated": (
        16384,
        {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096},
        16384,
    ),
    "by kind of layer": (
        40960,
        {"full_attention": QWEN3, "sliding_attention": {"rope_type": "default"}},
        40960,
    ),
}


def test_the_context_is_what_the_angles_are_made_for(subtests):
    for (name, (stated, rope, expected)), key in product(FORMS.items(), ("rope_parameters", "rope_scaling")):
        with subtests.test(name, key=key):
            config = {"max_position_embeddings": stated, key: rope}
            assert context_tokens(config) == context_tokens({"text_config": config}) == expected


def test_lengths_that_are_stretched_already_or_not_stated(subtests):
    with subtests.test("gemma 3 states the stretched length"):
        config = {"model_type": "gemma3_text", "max_position_embeddings": 131072}
        linear = {"rope_type": "linear", "factor": 8.0}
        for rope in ({"rope_scaling": linear}, {"rope_parameters": {"full_attention": linear}}):
            assert context_tokens(config | rope) == 131072
    for config in [
        {},
        {"max_position_embeddings": None},
        {"max_position_embeddings": 9, "rope_scaling": "yarn"},
    ]:
        with (
            subtests.test("what says nothing is an error", config=config),
            pytest.raises((KeyError, TypeError, ValueError, AttributeError)),
        ):
            context_tokens(config)
