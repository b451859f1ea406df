"""Linear layers in floats of 8 bits: what they round, and which layers are replaced."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.torch.quantized import stored
from services.cli.model.make_model import make_model
from services.engine.torch.checkpoint import load_model, open_checkpoint, stored_weights
from services.engine.torch.model.check.model_probe import attending_by
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.products import ProductPart
from services.engine.torch.quantized import float8, float8_products
from services.engine.torch.quantized.dequantize import scaled
from services.engine.torch.quantized.float8 import Float8Linear, compute_in_float8
from services.engine.torch.quantized.float8_products import RowProduct, RowWeight, round_rows_plainly

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
    # A row's product is its own.
    assert torch.equal(layer(rows[1:, 2:3])[0, 0], got[1, 2])


@pytest.mark.parametrize("row_scales", [True, False])
def test_the_numbers_of_the_checkpoint_are_kept(row_scales, tmp_path):
    directory = quantized(tmp_path, row_scales=row_scales)
    checkpoint = open_checkpoint(directory, "bfloat16")
    model = load_model(checkpoint, CPU)
    before = logits(model)
    assert compute_in_float8(model, (), stored_weights(checkpoint)) == 14
    files = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            weight, numbers = module.product.weight, files[f"{name}.weight"]
            assert torch.equal(weight.numbers.view(torch.uint8), numbers.view(torch.uint8))
            assert (weight.scales[0] == files[f"{name}.weight_scale"].reshape(-1)).all()
    assert type(model.lm_head) is nn.Linear
    after = logits(model)
    assert 0 < (after - before).norm() / before.norm() < 0.6  # This model makes much of each difference.


def test_merged_products_are_multiplied_so_too(tmp_path):
    checkpoint = open_checkpoint(quantized(tmp_path), "bfloat16")
    given = []
    for stored_ in (stored_weights(checkpoint), None):
        single, merged = load_model(checkpoint, CPU), load_model(checkpoint, CPU)
        compute_in_float8(single, (), stored_)
        fused = fuse(merged)
        assert compute_in_float8(merged, (), stored_) == 8
        assert isinstance(merged.model.layers[0].self_attn.q_proj, ProductPart)
        given.append(logits(merged))
        with fused.as_defined():
            assert torch.equal(logits(merged), logits(single))
        assert sum(each.numel() for each in merged.model.layers.parameters()) == 4 * 64
    assert (given[0] - given[1]).norm() / given[0].norm() < 0.6


def test_whatever_is_a_linear_layer_can_be_rounded():
    model = load_model(open_checkpoint(stored.tiny_checkpoint(), "bfloat16"), CPU)
    before = logits(model)
    kept = {model.model.layers[0].mlp.up_proj}
    assert compute_in_float8(model, kept, None) == 13
    assert (logits(model) - before).norm() / before.norm() < 0.6


def test_what_cannot_compute_or_is_off_stays(subtests, tmp_path, monkeypatch, caplog):
    checkpoint = open_checkpoint(quantized(tmp_path), "bfloat16")
    caplog.set_level(logging.WARNING)
    with subtests.test("other numbers of the same name"):
        model = load_model(checkpoint, CPU)
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
        assert compute_in_float8(model, (), stored_weights(checkpoint)) == 13
    with subtests.test("a product that is off"):
        model = load_model(checkpoint, CPU)
        monkeypatch.setattr(float8, "round_rows_plainly", lambda rows: round_rows_plainly(rows.roll(1, 0)))
        before = logits(model)
        assert compute_in_float8(model, (), None) == 0
        assert torch.equal(logits(model), before)
        assert "off=1.4" in caplog.text
    with subtests.test("a device that cannot"):

        def fail(*_, **__):
            raise RuntimeError("no such device")

        caplog.clear()
        monkeypatch.undo()
        monkeypatch.setattr(torch, "_scaled_mm", fail)
        assert compute_in_float8(load_model(checkpoint, CPU), (), stored_weights(checkpoint)) == 0
        assert caplog.text.count("no such device") == 1


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
        monkeypatch.setattr(float8_products, "multiply_blocks", multiply_plainly)
        single, merged = load_model(checkpoint, CPU), load_model(checkpoint, CPU)
        assert compute_in_float8(single, (), stored_weights(checkpoint)) == 14
        fuse(merged)
        assert compute_in_float8(merged, (), stored_weights(checkpoint)) == 8
        numbers = single.model.layers[1].mlp.down_proj.product.weight.numbers
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(numbers.view(torch.uint8), weights[name].view(torch.uint8))
        assert (logits(single) - logits(merged)).norm() / logits(single).norm() < 0.05
    with subtests.test("a device wants so many rows"):

        def picky(numbers, scales, weight):
            if len(numbers) % 4:
                raise RuntimeError("a multiple of 4")
            return multiply_plainly(numbers, scales, weight)

        monkeypatch.setattr(float8_products, "multiply_blocks", picky)
        model = load_model(checkpoint, CPU)
        assert compute_in_float8(model, (), stored_weights(checkpoint)) == 14
        assert model.model.layers[0].mlp.up_proj.product.row_step == 4
        assert (logits(single) - logits(model)).norm() / logits(single).norm() < 0.05
    with subtests.test("a device that cannot"):
        monkeypatch.undo()
        assert compute_in_float8(load_model(checkpoint, CPU), (), stored_weights(checkpoint)) == 0
