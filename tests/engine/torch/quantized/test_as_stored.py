"""Linear layers that multiply weights as they are stored: what they round, and which are replaced."""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.torch.quantized import stored
from services.cli.model.make_model import make_model
from services.engine.torch.checkpoint import load_model, open_checkpoint, stored_weights
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.products import ProductPart
from services.engine.torch.model.model_probe import attending_by
from services.engine.torch.quantized import as_stored, stored_products
from services.engine.torch.quantized.as_stored import StoredLinear, multiply_as_stored, way_of
from services.engine.torch.quantized.dequantize import scaled
from services.engine.torch.quantized.stored_products import (
    RowProduct,
    RowWeight,
    round_rows_plainly,
    round_to_int4,
)

CPU = torch.device("cpu")


def quantized(folder, architecture="llama", row_scales=True):
    """A checkpoint as tools write it: each row's largest number becomes 448."""
    originals = load_file(stored.tiny_checkpoint(architecture) / "model.safetensors")

    def make(chance, name, rows, columns):
        weight = originals[f"{name}.weight"]
        largest = weight.abs().amax(1, keepdim=True) if row_scales else weight.abs().max().reshape(1)
        numbers, scale = (weight / (largest / 448)).to(torch.float8_e4m3fn), largest / 448
        return {f"{name}.weight": numbers, f"{name}.weight_scale": scale}, scaled(numbers, scale)

    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return stored.quantized_checkpoints(folder, architecture, config, stored.linears_by(make))[0]


def logits(model):
    with attending_by(model, "eager"), torch.inference_mode():
        return model(torch.arange(2, 90)[None], use_cache=False).logits[0].float()


def test_a_layer_multiplies_what_it_rounded():
    torch.manual_seed(0)
    linear = nn.Linear(96, 40).bfloat16()
    float8_weight = RowWeight.of([(0, *round_rows_plainly(linear.weight))], 40, 96)
    layer = RowProduct(float8_weight, linear.bias, round_rows_plainly)
    rows = torch.randn(2, 7, 96).bfloat16()
    rows[0, 3] = 0
    numbers, scales = round_rows_plainly(rows.reshape(-1, 96))
    assert scales.shape == (14, 1)
    assert (numbers.float().abs().amax(1)[torch.arange(14) != 3] == 448).all()
    weight = scaled(float8_weight.numbers[:40], float8_weight.scales[0, :40])
    expected = (numbers.float() * scales) @ weight.T
    got = layer(rows)
    assert (got.shape, got.dtype) == ((2, 7, 40), torch.bfloat16)
    plain = expected.bfloat16() + linear.bias
    torch.testing.assert_close(got.reshape(14, 40), plain, rtol=0.02, atol=0.01)
    assert layer(rows.float()).dtype == torch.float32
    assert torch.equal(replace(layer, row_step=16)(rows), got)
    # A row's product is its own.
    assert torch.equal(layer(rows[1:, 2:3])[0, 0], got[1, 2])


def test_the_numbers_of_the_checkpoint_are_kept(tmp_path, subtests):
    for name, row_scales in (("rows", True), ("tensor", False)):
        with subtests.test(name):
            (folder := tmp_path / name).mkdir()
            check_numbers(quantized(folder, row_scales=row_scales))


def check_numbers(directory):
    checkpoint = open_checkpoint(directory, "bfloat16")
    model = load_model(checkpoint, CPU)
    before = logits(model)
    assert multiply_as_stored(model, (), stored_weights(checkpoint)) == "float8_rows=14"
    files = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear):
            weight, numbers = module.product.weight, files[f"{name}.weight"]
            assert torch.equal(weight.numbers.view(torch.uint8), numbers.view(torch.uint8))
            assert (weight.scales[0] == files[f"{name}.weight_scale"].reshape(-1)).all()
    assert type(model.lm_head) is nn.Linear
    after = logits(model)
    assert 0 < (after - before).norm() / before.norm() < 0.6  # This model makes much of each difference.


def test_merged_products_are_multiplied_so_too(tmp_path):
    checkpoint = open_checkpoint(quantized(tmp_path), "bfloat16")
    given = []
    for stored_ in (stored_weights(checkpoint), "fp8"):
        single, merged = load_model(checkpoint, CPU), load_model(checkpoint, CPU)
        multiply_as_stored(single, (), stored_)
        fused = fuse(merged)
        assert multiply_as_stored(merged, (), stored_) == "float8_rows=8"
        assert isinstance(merged.model.layers[0].self_attn.q_proj, ProductPart)
        given.append(logits(merged))
        with fused.as_defined():
            assert torch.equal(logits(merged), logits(single))
        assert sum(each.numel() for each in merged.model.layers.parameters()) == 4 * 64
    assert (given[0] - given[1]).norm() / given[0].norm() < 0.6


def test_a_member_that_is_not_stored_so_leaves_the_others_their_numbers(tmp_path):
    checkpoint = open_checkpoint(quantized(tmp_path), "bfloat16")
    single, merged = load_model(checkpoint, CPU), load_model(checkpoint, CPU)
    for model in (single, merged):
        model.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    assert multiply_as_stored(single, (), stored_weights(checkpoint)) == "float8_rows=12"
    fused = fuse(merged)
    weight = merged.model.layers[1].mlp.up_proj.weight.clone()
    assert multiply_as_stored(merged, (), stored_weights(checkpoint)) == "float8_rows=9"
    first, second = merged.model.layers
    assert isinstance(first.self_attn.q_proj, ProductPart)
    kinds = {name: type(each) for name, each in second.named_modules() if isinstance(each, nn.Linear)}
    assert [name for name, kind in kinds.items() if kind is nn.Linear] == ["self_attn.q_proj", "mlp.up_proj"]
    assert sum(kind is StoredLinear for kind in kinds.values()) == 5
    assert torch.equal(second.mlp.up_proj.weight, weight)
    assert not [name for name, _ in second.named_parameters() if "merged" in name]
    with fused.as_defined():
        assert torch.equal(logits(merged), logits(single))
    assert (logits(merged) - logits(single)).norm() / logits(single).norm() < 0.05


def test_whatever_is_a_linear_layer_can_be_rounded():
    model = load_model(open_checkpoint(stored.tiny_checkpoint(), "bfloat16"), CPU)
    before = logits(model)
    kept = {model.model.layers[0].mlp.up_proj}
    assert multiply_as_stored(model, kept, "fp8") == "float8_rows=13"
    assert (logits(model) - before).norm() / before.norm() < 0.6


def test_weights_can_be_rounded_to_4_bits():
    linear = nn.Linear(256, 48).bfloat16()
    rounded = round_to_int4(linear.weight)
    assert rounded.scale.shape == (48, 2)
    off = rounded.floats() - linear.weight.float()
    assert (off.abs() <= rounded.scale.repeat_interleave(128, 1) * 1.01).all()
    assert off.norm() / linear.weight.norm() < 0.1
    model = load_model(open_checkpoint(stored.tiny_checkpoint(), "bfloat16"), CPU)
    before = logits(model)
    assert multiply_as_stored(model, (), "int4") == "int4=14"
    assert 0 < (logits(model) - before).norm() / before.norm() < 1


def test_what_cannot_compute_or_is_off_stays(subtests, tmp_path, monkeypatch, caplog):
    checkpoint = open_checkpoint(quantized(tmp_path), "bfloat16")
    caplog.set_level(logging.WARNING)
    with subtests.test("other numbers of the same name"):
        model = load_model(checkpoint, CPU)
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
        assert multiply_as_stored(model, (), stored_weights(checkpoint)) == "float8_rows=13"
    with subtests.test("a product that is off"):
        model = load_model(checkpoint, CPU)
        monkeypatch.setattr(as_stored, "round_rows_plainly", lambda rows: round_rows_plainly(rows.roll(1, 0)))
        before = logits(model)
        assert multiply_as_stored(model, (), "fp8") == ""
        assert torch.equal(logits(model), before)
        assert "off=1.4" in caplog.text
    with subtests.test("a device that cannot"):
        caplog.clear()
        monkeypatch.undo()
        monkeypatch.setattr(torch, "_scaled_mm", fail)
        assert multiply_as_stored(load_model(checkpoint, CPU), (), stored_weights(checkpoint)) == ""
        assert caplog.text.count("no such device") == 3  # with other numbers of rows, too


def test_a_gpu_without_floats_of_8_bits_still_multiplies_those_of_4(subtests, tmp_path, monkeypatch, caplog):
    """The kernels here are stand-ins: they raise, as Triton does before compute capability 8.9."""
    cuda, name = torch.device("cuda"), "services.engine.torch.quantized.stored_kernel"
    with subtests.test("they are rounded by torch, and products of 4 bits are a kernel's"):
        found = SimpleNamespace(KERNELS=object(), round_rows=fail, round_groups=fail)
        monkeypatch.setitem(sys.modules, name, found)
        kernels = as_stored.kernels_on(cuda)
        assert kernels.round_rows is round_rows_plainly and kernels.int4 is found.KERNELS
        assert "rounding_kernel_unusable" in caplog.text
    with subtests.test("without Triton numbers of 4 bits stay dequantized, which is faster than torch"):
        monkeypatch.setitem(sys.modules, name, None)
        kernels = as_stored.kernels_on(cuda)
        assert kernels.int4 is None
        model = load_model(open_checkpoint(stored.tiny_checkpoint(), "bfloat16"), CPU)
        monkeypatch.setattr(as_stored, "kernels_on", lambda device: kernels)
        assert multiply_as_stored(model, (), "int4") == ""
        assert multiply_as_stored(model, (), "fp8") == "float8_rows=14"


def fail(*_, **__):
    raise RuntimeError("no such device")


def test_what_computes_is_told_by_layer_and_by_where_its_numbers_are_from():
    ways = set()
    for form, kept_layers in (("fp8", (0,)), ("fp8", (1,)), ("int4", (0,)), (None, (0,))):
        model = load_model(open_checkpoint(stored.tiny_checkpoint(), "bfloat16"), CPU)
        kinds, kept = {}, {model.model.layers[i].mlp.up_proj for i in kept_layers}
        said = multiply_as_stored(model, kept, form or "int4", kinds.__setitem__)
        assert len(kinds) == 13 and said.endswith("=13")
        ways.add(way_of(form, kinds))
        assert way_of(form, dict(reversed(kinds.items()))) in ways
    assert len(ways) == 4
    assert way_of(None, {}) == ""


def test_a_step_that_a_device_cannot_go_is_given_up_and_a_passing_fault_is_not(subtests, monkeypatch):
    linear = nn.Linear(16, 16).bfloat16()
    weight = RowWeight.of([(0, *round_rows_plainly(linear.weight))], 16, 16)
    refusal = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
    faults = {1: 1.0, 4: refusal, 16: 0.0}  # An error of 1 is off.

    def try_it(product, *_):
        fault = faults[product.row_step]
        if isinstance(fault, Exception):
            raise fault
        return fault

    monkeypatch.setattr(as_stored, "_error", try_it)
    ways = as_stored._Ways(as_stored.StoredKernels(), 0.02)
    tried = ("it", linear)
    with subtests.test("a way that failed, and not one that was off"):
        assert ways.product(weight, linear, tried).row_step == 16
        faults.update({1: 0.0, 4: AssertionError("it is tried again")})
        assert ways.product(weight, linear, tried).row_step == 1
    for fault in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: unspecified")):
        with subtests.test("what may pass", fault=fault), pytest.raises(type(fault)):
            faults[1] = fault
            ways.product(weight, linear, tried)


def multiply_plainly(numbers, scales, weight):
    """What cuBLAS does on Hopper with scales as they lie there."""
    blocks = numbers.shape[1] // 128
    assert scales.stride() == (1, len(numbers)) or len(numbers) == 1
    assert weight.scales.shape == (-(-weight.num_rows // 128), -(-blocks // 4) * 4)
    own = numbers.float() * scales.repeat_interleave(128, 1)
    return (own @ scaled(weight.numbers, weight.scales[:, :blocks], None, (128, 128)).T).bfloat16()


def test_blocks_of_a_checkpoint_are_kept(subtests, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights = {}

    def make(chance, name, rows, columns):
        blocks = -(-rows // 128), -(-columns // 128)
        numbers = torch.randn((rows, columns), generator=generator).mul_(99).to(torch.float8_e4m3fn)
        scale = torch.rand(blocks, generator=generator) / 1000 + 1e-4
        weights[f"{name}.weight"] = numbers
        return {f"{name}.weight": numbers, f"{name}.weight_scale_inv": scale}, scaled(
            numbers, scale, None, (128, 128)
        )

    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    make_model(tmp_path / "wide", hidden_size=256, vocab_size=512)
    directory, _ = stored.quantized_checkpoints(tmp_path, tmp_path / "wide", config, stored.linears_by(make))
    checkpoint = open_checkpoint(directory, "bfloat16")
    with subtests.test("they are multiplied as they are"):
        monkeypatch.setattr(stored_products, "multiply_blocks", multiply_plainly)
        single, merged = load_model(checkpoint, CPU), load_model(checkpoint, CPU)
        assert multiply_as_stored(single, (), stored_weights(checkpoint)) == "float8_blocks=14"
        fuse(merged)
        assert multiply_as_stored(merged, (), stored_weights(checkpoint)) == "float8_blocks=8"
        numbers = single.model.layers[1].mlp.down_proj.product.weight.numbers
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(numbers.view(torch.uint8), weights[name].view(torch.uint8))
        assert (logits(single) - logits(merged)).norm() / logits(single).norm() < 0.05
    with subtests.test("a device wants so many rows"):

        def picky(numbers, scales, weight):
            if len(numbers) % 4:
                raise RuntimeError("a multiple of 4")
            return multiply_plainly(numbers, scales, weight)

        monkeypatch.setattr(stored_products, "multiply_blocks", picky)
        model = load_model(checkpoint, CPU)
        assert multiply_as_stored(model, (), stored_weights(checkpoint)) == "float8_blocks=14"
        assert model.model.layers[0].mlp.up_proj.product.row_step == 4
        assert (logits(single) - logits(model)).norm() / logits(single).norm() < 0.05
    with subtests.test("a device that cannot"):
        monkeypatch.undo()
        assert multiply_as_stored(load_model(checkpoint, CPU), (), stored_weights(checkpoint)) == ""


@pytest.mark.exact
def test_numbers_of_4_bits_are_kept(subtests, tmp_path, caplog):
    group = {"num_bits": 4, "group_size": 16}
    packed = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": group}},
    }
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    for config, make, counts in [
        (packed, stored.compressed_int4, ("int4=14", "int4=8")),
        (awq, stored.awq, ("int4=14", "int4=8")),
        (gptq, stored.gptq, ("", "")),  # Its columns are of groups in another order.
    ]:
        with subtests.test(config["quant_method"]):
            folder = tmp_path / config["quant_method"]
            directory, meant = stored.quantized_checkpoints(folder, "llama", config, stored.linears_by(make))
            checkpoint = open_checkpoint(directory)
            whole = load_model(open_checkpoint(meant), CPU)
            for fuses, count in zip((False, True), counts, strict=True):
                model = load_model(checkpoint, CPU)
                if fuses:
                    fuse(model)
                assert multiply_as_stored(model, (), stored_weights(checkpoint)) == count
                torch.testing.assert_close(logits(model), logits(whole), rtol=1e-3, atol=1e-3)
