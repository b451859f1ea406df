"""The kernels for weights of 4 bits, in Triton's interpreter and compiled (make test-triton)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.engine.torch.quantized.dequantize import Grouped
from services.engine.torch.quantized.stored_products import Int4Product, Int4Weight

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def kernels():
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from services.engine.torch.quantized.stored_kernel import KERNELS

    return KERNELS


def grouped(num_rows, depth, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (num_rows, depth), generator=generator, dtype=torch.int32)
    points = torch.randint(0, 16, (num_rows, depth // size), generator=generator, dtype=torch.int32)
    scale = torch.rand((num_rows, depth // size), generator=generator) / 8 + 0.01
    return Grouped(values, points, scale, 4, None)


@pytest.mark.parametrize(
    ("num_rows", "depth", "size"),
    [(64, 128, 128), (72, 256, 32), (200, 640, 64), (64, 1280, 128), (128, 256, 256), (64, 96, 16)],
)
def test_products_are_those_of_the_numbers(num_rows, depth, size, kernels):
    own = grouped(num_rows, depth, size)
    weight = Int4Weight.of([(0, own)], num_rows, depth)
    meant = own.floats()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        assert torch.equal(kernels.dequantize(weight, dtype), meant.to(dtype))
        bias = torch.randn(num_rows, generator=torch.Generator().manual_seed(1)).to(dtype)
        product = Int4Product(weight, bias, kernels)
        for count in (1, 5, 16, 17, 64, 65):
            rows = torch.randn((1, count, depth), generator=torch.Generator().manual_seed(count)).to(dtype)
            got = product(rows)
            assert (got.shape, got.dtype) == ((1, count, num_rows), dtype)
            expected = rows.double() @ meant.double().t() + bias.double()
            off = (got.double() - expected).square().mean() / expected.square().mean()
            assert off.sqrt() < tolerance
        # A row's product is its own.
        assert torch.equal(product(rows[:, 3:4]), product(rows[:, 2:20])[:, 1:2])


def test_columns_of_several_layers_lie_one_after_another(kernels):
    parts = [grouped(40, 256, 64, seed=1), grouped(24, 256, 64, seed=2)]
    weight = Int4Weight.of([(0, parts[0]), (48, parts[1])], 72, 256)
    rows = torch.randn((3, 256), generator=torch.Generator().manual_seed(0))
    product = Int4Product(weight, None, kernels)(rows)
    torch.testing.assert_close(product[:, :40], rows @ parts[0].floats().t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product[:, 48:], rows @ parts[1].floats().t(), rtol=1e-4, atol=1e-4)
    assert not product[:, 40:48].any()


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_for_stored_weights_compile_for_gpus_once_for_each_size(capability, tmp_path):
    """A process of its own compiles, for what is interpreted cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = Path(__file__).parent / "compile_stored_kernels.py"
    done = subprocess.run(
        [sys.executable, program, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    rounding = int(capability >= 89)
    counts = {"_round_row": rounding, "_round_groups": rounding, "_join": 1, "_dequantize": 1}
    # For 16, 32 and 64 rows each, and for sums that are joined and those that are not.
    assert {name: count for name, (count, _) in kernels.items()} == counts | {"_multiply": 6}
    assert max(shared for _, shared in kernels.values()) <= 99 << 10
