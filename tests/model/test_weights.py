"""Weights reckoned from config.json against what checkpoints really hold."""

import json

import pytest
from safetensors import safe_open

from bench.families import FAMILIES
from exactness.checkpoints import tiny_checkpoint
from exactness.model_configs import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    LLAMA_3_1_8B,
    QWEN3_5_35B_A3B,
    QWEN3_8B,
    QWEN3_NEXT,
)
from services.cli.model.make_model import ARCHITECTURES
from services.model.weights import weights
from services.values.errors import ConfigError


def num_parameters(config):
    model = weights(config)
    return model.attention + model.feed_forward


UNCOUNTED = {"jamba": "size of a recurrent layer", "gemma4": "embeddings of each layer"}


QUICK = {"llama", "qwen3_5", "falcon_h1", "gpt_oss", "gemma3", "deepseek_v3"}


def test_a_checkpoint_of_ours_has_about_so_many_parameters(subtests):
    for architecture in sorted(QUICK):
        with subtests.test(architecture):
            check_parameters(architecture)


@pytest.mark.exact
@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *FAMILIES} - UNCOUNTED.keys() - QUICK))
def test_every_checkpoint_of_ours_has_about_so_many_parameters(architecture):
    check_parameters(architecture)


def check_parameters(architecture):
    """Biases and the norms of heads are not counted: next to nothing of a model of any size."""
    directory = tiny_checkpoint(architecture)
    config = json.loads((directory / "config.json").read_text())
    held = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            names = tensors.keys()
            held += sum(tensors.get_tensor(name).size for name in names)
    assert num_parameters(config) == pytest.approx(held, rel=0.03)


def test_what_is_not_counted_or_not_known_is_said(subtests):
    for architecture, said in UNCOUNTED.items():
        with subtests.test("what is not counted is said", architecture=architecture):
            config = json.loads((tiny_checkpoint(architecture) / "config.json").read_text())
            with pytest.raises(ConfigError, match=said):
                weights(config)
    for changes, said in [
        ({"vocab_size": None}, "size of the weights"),
        ({"quantization_config": {"quant_method": "quark"}}, "quark"),
    ]:
        with (
            subtests.test("what cannot be known is said", changes=changes),
            pytest.raises(ConfigError, match=said),
        ):
            weights(QWEN3_8B | changes)


# What their model cards say, in billions.
def test_known_models_have_what_is_said_of_them(subtests):
    for config, billions in [(QWEN3_8B, 8.19), (LLAMA_3_1_8B, 8.03), (DEEPSEEK_V3, 671.0)]:
        with subtests.test("known models have what their cards say", config=config):
            assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.002)
    for config, billions in [(QWEN3_5_35B_A3B, 35), (QWEN3_NEXT, 80), (GPT_OSS_120B, 117)]:
        with subtests.test("hybrids and experts have about what their names say", config=config):
            unquantized = {name: value for name, value in config.items() if name != "quantization_config"}
            assert num_parameters(unquantized) / 1e9 == pytest.approx(billions, rel=0.02)


def test_quantized_weights_take_what_their_bits_take():
    plain = weights(QWEN3_8B).bytes_per_gpu()
    tables = 2 * 151936 * 4096 * 2
    group = {"num_bits": 4, "group_size": 128, "symmetric": True}
    for quantization, bits in [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": group}}}, 4.125),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ]:
        quantized = QWEN3_8B | {"quantization_config": quantization}
        held = weights(quantized).bytes_per_gpu()
        assert held == pytest.approx((plain - tables) * bits / 16 + tables, rel=1e-3)
        assert weights(quantized, dequantized=True).bytes_per_gpu() == plain
    gpt_oss = weights(GPT_OSS_120B)  # 63 GiB, of which 60.8 are experts'
    assert gpt_oss.attention_item_bytes == 2
    assert gpt_oss.bytes_per_gpu() / 2**30 == pytest.approx(60.8, rel=0.02)


def test_attention_is_whole_on_every_rank_of_dp_attention():
    model = weights(DEEPSEEK_V3)
    alone, together = model.bytes_per_gpu(1, 8), model.bytes_per_gpu(8, 1)
    assert model.bytes_per_gpu(1, 1) / 8 == pytest.approx(together)
    assert alone - together == pytest.approx(model.attention * model.attention_item_bytes * 7 / 8)


def test_experts_of_each_kind_are_counted():
    base = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    base |= {"intermediate_size": 16, "torch_dtype": "bfloat16"}
    dense = weights(base).feed_forward
    assert dense == 2 * 3 * 8 * 16
    mixtral = weights(base | {"num_local_experts": 4})
    assert mixtral.feed_forward == 4 * dense + 2 * 8 * 4
    qwen = weights(base | {"num_experts": 4, "moe_intermediate_size": 4})
    assert qwen.feed_forward == dense + 2 * 8 * 4
    first_dense = weights(
        base | {"n_routed_experts": 4, "moe_intermediate_size": 4, "first_k_dense_replace": 1}
    )
    assert first_dense.feed_forward == dense + 8 * 4
