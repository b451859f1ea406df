"""A quantized checkpoint is the model that its numbers mean, to the bit; whatever is not read is refused."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.torch.quantized import stored
from engine.torch.sequences import PageTables, Sequence, generate
from exactness.reference import random_prompt
from services.engine.torch.checkpoint import load_model, model_fingerprint, open_checkpoint
from services.engine.torch.quantized.dequantize import packed, packed_columns, scaled
from services.engine.torch.runner import TorchRunner
from services.model.quantization import quantization_of
from services.values.errors import ConfigError

CPU = torch.device("cpu")


def compressed(kind, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"g": {"weights": weights}},
    }


FORMATS = {
    "fp8_block": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, stored.fp8_block),
    "fp8_rows": (compressed("float-quantized", num_bits=8, type="float"), stored.fp8_rows),
    "fp8_tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, stored.fp8_tensor),
    "int4": (compressed("pack-quantized", num_bits=4, group_size=16), stored.compressed_int4),
    "int4_by_order": (compressed("pack-quantized", num_bits=4), stored.compressed_int4_by_order),
    "int8": (compressed("int-quantized", num_bits=8, symmetric=False), stored.int8),
    "int8_packed": (
        compressed("pack-quantized", num_bits=8, symmetric=False),
        stored.compressed_int8_asymmetric,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, stored.gptq),
    "gptq_v2": ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, stored.gptq_v2_int8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, stored.awq),
    "nvfp4": (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), stored.nvfp4_compressed),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored.nvfp4_modelopt),
}


@pytest.mark.exact
def test_a_format_means_what_it_means(tmp_path, subtests):
    for kind, (config, make) in FORMATS.items():
        (folder := tmp_path / kind).mkdir()
        quantized, meant = stored.quantized_checkpoints(folder, "llama", config, stored.linears_by(make))
        for dtype in ("float32", "bfloat16"):
            with subtests.test(kind=kind, dtype=dtype):
                same_weights(quantized, meant, dtype)


def same_weights(quantized, meant, dtype):
    opened = open_checkpoint(quantized, dtype)
    assert opened.is_quantized
    got, expected = (load_model(each, CPU).state_dict() for each in (opened, open_checkpoint(meant, dtype)))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_experts_are_merged_of_what_they_mean(tmp_path):
    config, make = FORMATS["fp8_block"]
    same_weights(
        *stored.quantized_checkpoints(tmp_path, "qwen3_moe", config, stored.linears_by(make)), "bfloat16"
    )


def test_experts_of_gpt_oss_lie_transposed(tmp_path):
    chance = random.Random(0)

    def replace(name, tensor):
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts = [stored.mxfp4(chance, tensor.shape[2], tensor.shape[1]) for _ in tensor]
        blocks, scales, meant = (torch.stack(each) for each in zip(*experts, strict=True))
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, meant

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    quantized, meant = stored.quantized_checkpoints(tmp_path, "gpt_oss", config, replace)
    assert any(name.endswith("_blocks") for name in load_file(quantized / "model.safetensors"))
    same_weights(quantized, meant, "bfloat16")


def test_a_rank_answers_as_the_dequantized_model_and_is_not_it(tmp_path):
    # It is quantized as real ones are, so that its answers are a model's.
    def make(chance, name, rows, columns):
        weight = originals[f"{name}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        return {f"{name}.weight": numbers, f"{name}.weight_scale": scale}, scaled(numbers, scale)

    originals = load_file(stored.tiny_checkpoint() / "model.safetensors")
    config, _ = FORMATS["fp8_rows"]
    directories = stored.quantized_checkpoints(tmp_path, "llama", config, stored.linears_by(make))
    answers, fingerprints = [], set()
    for directory in (*directories, stored.tiny_checkpoint()):
        runner = TorchRunner(directory, num_pages=16, page_size=16, self_check=False)
        sequence = Sequence(random_prompt(40, seed=1), PageTables(runner).take(100), 16)
        generate(runner, [sequence], 30)
        answers.append(sequence.output_ids)
        fingerprints.add(runner.layout.model_fingerprint)
        runner.close()
    assert answers[0] == answers[1] != answers[2]
    assert len(fingerprints) == 3
    assert model_fingerprint(directories[0]) not in fingerprints


def test_what_is_not_read_is_refused_by_name(subtests, tmp_path):
    for config, said in [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": ["fp8"]}, "not served"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "gemv"),
        ({"quant_method": "awq", "format": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "not understood"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        (compressed("marlin-24", num_bits=4), "marlin-24"),
        (compressed("pack-quantized", num_bits=3), "3 bits"),
        (compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (compressed("dense") | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ]:
        with subtests.test(said), pytest.raises(ConfigError, match=said):
            quantization_of({"quantization_config": config})
        with subtests.test(said), pytest.raises(ConfigError, match=said):
            quantization_of({"text_config": {"quantization_config": config}})

    assert quantization_of({"quantization_config": {"quant_method": "gptq", "bits": "4"}}).linear_bits == 4

    def damage(damaged, kind="fp8_rows"):
        config, make = FORMATS[kind]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        quantized, _ = stored.quantized_checkpoints(folder, "llama", config, stored.linears_by(make))
        tensors = load_file(quantized / "model.safetensors")
        damaged(tensors)
        save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
        return quantized

    name = "model.layers.1.mlp.up_proj.weight"
    with subtests.test("numbers without a scale"):
        quantized = damage(lambda tensors: tensors.pop(f"{name}_scale"))
        with pytest.raises(ConfigError, match=f"{name} is of F8_E4M3, and nothing says"):
            open_checkpoint(quantized)
        path = quantized / "config.json"  # Nobody has to say that floats of 8 bits are quantized.
        said = {key: value for key, value in json.loads(path.read_text()).items() if "quant" not in key}
        path.write_text(json.dumps(said))
        with pytest.raises(ConfigError, match=f"{name} is of F8_E4M3"):
            open_checkpoint(quantized)
    base = name.removesuffix(".weight")
    for kind, part in [
        ("int8", "weight_zero_point"),
        ("int8_packed", "weight_zero_point"),
        ("nvfp4", "weight_global_scale"),
        ("modelopt", "weight_scale_2"),
    ]:
        with subtests.test("a part that is missing", kind=kind):
            quantized = damage(lambda tensors, part=part: tensors.pop(f"{base}.{part}"), kind)
            with pytest.raises(ConfigError, match=f"there is no {base}.{part}"):
                open_checkpoint(quantized)
    with subtests.test("scales of another shape"):
        quantized = damage(lambda tensors: tensors.update({f"{name}_scale": torch.ones(7, 1)}))
        with pytest.raises(ConfigError, match=f"{name} cannot be made of its parts: scales"):
            load_model(open_checkpoint(quantized), CPU)
    with subtests.test("a missing weight"):
        quantized = damage(lambda tensors: [tensors.pop(name), tensors.pop(f"{name}_scale")])
        with pytest.raises(ConfigError, match="up_proj"):
            load_model(open_checkpoint(quantized), CPU)


def test_parts_of_shapes_that_do_not_agree_are_refused(subtests):
    words, scale = torch.zeros(64, 8, dtype=torch.int32), torch.ones(64, 4)
    zero, groups = torch.zeros(8, 4, dtype=torch.int32), torch.arange(64, dtype=torch.int32) % 4
    assert packed(words, scale, 64, zero, groups).floats().shape == (64, 64)
    columns, zeros = words.T, torch.zeros(4, 8, dtype=torch.int32)
    assert packed_columns(columns, zeros, scale.T, groups, True).floats().shape == (64, 64)
    float8 = torch.ones(64, 64)
    for what, make in [
        ("zero points cut short", lambda: packed(words, scale, 64, zero[:1])),
        ("zero points of fewer groups", lambda: packed(words, scale, 64, zero[:, :1])),
        ("scales of fewer rows", lambda: packed(words, scale[:1], 64, zero)),
        ("groups below 0", lambda: packed(words, scale, 64, None, groups - 1)),
        ("groups that are not there", lambda: packed(words, scale, 64, zero, groups + 1)),
        ("groups of fewer columns", lambda: packed(words, scale, 64, zero, groups[:1])),
        ("GPTQ's groups below 0", lambda: packed_columns(columns, zeros, scale.T, groups - 1, True)),
        ("GPTQ's groups too many", lambda: packed_columns(columns, zeros, scale.T, groups + 1, True)),
        ("GPTQ's groups cut short", lambda: packed_columns(columns, zeros, scale.T, groups[:5], True)),
        ("GPTQ's zero points", lambda: packed_columns(columns, zeros[:1], scale.T, groups, True)),
        ("GPTQ's scales", lambda: packed_columns(columns, zeros, scale.T[:0], groups, True)),
        ("GPTQ's numbers", lambda: packed_columns(columns[:, :4], zeros, scale.T, groups, True)),
        ("scales of parts", lambda: scaled(float8, torch.ones(4))),
    ]:
        with subtests.test(what), pytest.raises(ConfigError, match=r"fit|a group that is none"):
            make().floats()


def test_what_has_no_place_in_the_model_is_refused(subtests, tmp_path):
    config, make = FORMATS["awq"]
    quantized, _ = stored.quantized_checkpoints(tmp_path, "llama", config, stored.linears_by(make))
    tensors = load_file(quantized / "model.safetensors")
    for name, tensor, is_refused in [
        ("model.layers.0.mlp.act.scales", torch.ones(8), True),
        ("model.layers.0.mlp.up_proj.bias", torch.ones(8), True),
        ("model.layers.0.mlp.up_proj.bias", torch.zeros(8), False),  # GPTQ has written such.
        ("model.layers.0.mlp.up_proj.weight_scale", torch.ones(8), True),
        ("model.layers.9.eh_proj.weight", torch.ones(8), False),
    ]:
        with subtests.test(name, is_refused=is_refused):
            file = quantized / "model.safetensors"
            save_file({**tensors, name: tensor}, file, metadata={"format": "pt"})
            checkpoint = open_checkpoint(quantized)
            if is_refused:
                with pytest.raises(ConfigError, match=f"no place in LlamaForCausalLM: .*{name}"):
                    load_model(checkpoint, CPU)
            else:
                load_model(checkpoint, CPU)
