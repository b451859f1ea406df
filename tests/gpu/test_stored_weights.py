"""Products with weights as they are stored, on the device: in 8-bit floats, of 4 bits; in a graph, too."""

import pytest
import torch

from engine.torch.sequences import PageTables, Sequence, generate
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt
from services.engine.torch.quantized.as_stored import kernels_on
from services.engine.torch.quantized.dequantize import Grouped, scaled
from services.engine.torch.quantized.stored_products import (
    PLAIN,
    BlockProduct,
    BlockWeight,
    Int4Product,
    Int4Weight,
    RowProduct,
    RowWeight,
    round_groups_plainly,
    round_rows_plainly,
)
from services.engine.torch.runner import TorchRunner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES = [(2560, 2560), (5120, 2560), (2560, 9728), (200, 128)]


def random_weight(device, num_rows, depth):
    generator = torch.Generator(device).manual_seed(num_rows)
    return torch.randn((num_rows, depth), generator=generator, device=device)


def off_by(got, expected):
    return ((got.float() - expected).square().mean() / expected.square().mean()).sqrt().item()


def check_product(product, meant, device):
    """It is what the rounded numbers give; captured, it gives the same bits."""
    for num_rows in (1, 3, 16, 64, 300):
        rows = random_weight(device, num_rows, meant.shape[1]).bfloat16()
        assert off_by(product(rows), rows.float() @ meant.T) < 0.04
    if torch.device(device).type == "cuda":
        rows = random_weight(device, 8, meant.shape[1]).bfloat16()
        expected = product(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(rows)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize(("num_rows", "depth"), SHAPES)
def test_rows_and_scales_of_rows(device, num_rows, depth):
    numbers, scales = round_rows_plainly(random_weight(device, num_rows, depth))
    rounding = kernels_on(torch.device(device))
    if torch.device(device).type == "cuda":
        assert rounding.round_rows is not round_rows_plainly
        assert rounding.round_groups is not round_groups_plainly
    rows = random_weight(device, 100, depth).bfloat16()
    for kernel, plain in (
        (rounding.round_rows, round_rows_plainly),
        (rounding.round_groups, round_groups_plainly),
    ):
        if plain is round_groups_plainly and depth % 128:
            continue
        got, expected = kernel(rows), plain(rows)
        torch.testing.assert_close(got[1], expected[1])
        assert (got[0].float() != expected[0].float()).float().mean() < 1e-2
    product = RowProduct(RowWeight.of([(0, numbers, scales)], num_rows, depth), None, rounding.round_rows)
    check_product(product, scaled(numbers, scales), device)


@pytest.mark.parametrize(("num_rows", "depth"), SHAPES[:3])
def test_scales_of_blocks(device, num_rows, depth):
    """On Hopper alone, by cuBLAS: which rows it takes is seen, too."""
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("torch has these products on Hopper alone")
    numbers = (99 * random_weight(device, num_rows, depth)).to(torch.float8_e4m3fn)
    scales = torch.rand((-(-num_rows // 128), depth // 128), device=device) / 1000 + 1e-4
    weight = BlockWeight.of([(0, numbers, scales)], num_rows, depth)
    meant = scaled(numbers, scales, None, (128, 128))
    errors = []
    for step in (1, 4, 16):
        try:
            product = BlockProduct(weight, None, kernels_on(torch.device(device)).round_groups, step)
            check_product(product, meant, device)
            return
        except RuntimeError as error:
            errors.append(f"{step}: {error}")
    pytest.fail("\n".join(errors))


@pytest.mark.parametrize(("num_rows", "depth", "size"), [(2560, 2560, 128), (5120, 2560, 64), (200, 384, 32)])
def test_numbers_of_4_bits(device, num_rows, depth, size):
    generator = torch.Generator(device).manual_seed(0)
    values, points = (
        torch.randint(0, 16, (num_rows, count), generator=generator, device=device)
        for count in (depth, depth // size)
    )
    scale = torch.rand((num_rows, depth // size), generator=generator, device=device) / 8 + 0.01
    own = Grouped(values, points, scale, 4, None)
    kernels = kernels_on(torch.device(device)).int4
    product = Int4Product(Int4Weight.of([(0, own)], num_rows, depth), None, kernels)
    if torch.device(device).type == "cuda":
        assert kernels is not PLAIN
    check_product(product, own.floats(), device)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_a_model_answers_with_weights_that_are_rounded_now(device, weights):
    """It does with graphs and without."""
    answers = []
    for graph_mib in (None, 0):
        runner = TorchRunner(
            tiny_checkpoint("qwen3"),
            device=device,
            dtype="bfloat16",
            num_pages=64,
            page_size=16,
            weights=weights,
            max_rows=4,
            graph_mib=graph_mib,
        )
        tables = PageTables(runner)
        sequences = [Sequence(random_prompt(n, seed=n), tables.take(n + 30), 16) for n in (5, 60)]
        generate(runner, sequences, 20)
        answers.append([sequence.output_ids[:20] for sequence in sequences])
        runner.close()
    assert answers[0] == answers[1]
