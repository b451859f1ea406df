"""The kernel that rounds rows to floats of 8 bits, in Triton's interpreter (make test-triton)."""

import os
from itertools import product

import pytest
import torch

from services.engine.torch.quantized.stored_products import round_groups_plainly, round_rows_plainly

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def kernels():
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from services.engine.torch.quantized.stored_kernel import round_groups, round_rows

    return {"rows": (round_rows, round_rows_plainly), "groups": (round_groups, round_groups_plainly)}


CASES = [*product(["rows"], [16, 144, 2560, 5120, 9728]), *product(["groups"], [128, 2560, 5504])]


@pytest.mark.parametrize(("of", "depth"), CASES)
def test_rows_are_rounded_as_torch_does(of, depth, kernels):
    kernel, plainly = kernels[of]
    generator = torch.Generator().manual_seed(depth)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn((5, depth), generator=generator).to(dtype)
        rows[1] = 0
        rows[2] *= 1e-3
        rows[3, 3] = 300
        numbers, scales = kernel(rows)
        expected, expected_scales = plainly(rows)
        assert numbers.dtype == torch.float8_e4m3fn
        assert scales.stride(0) == expected_scales.stride(0) == 1
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        # The interpreter loses the carry of what is rounded up to a power of two, and rounds small ones down.
        bits = expected.view(torch.uint8).int()
        is_told = (bits & 7 != 0) & (bits & 0x78 != 0)
        assert is_told[[0, 4]].float().mean() > 0.8
        off = (numbers.view(torch.uint8).int() - bits)[is_told].abs()
        assert off.max() <= 1  # It rounds what is halfway up, not to the even one.
        assert off.float().mean() < 0.02
