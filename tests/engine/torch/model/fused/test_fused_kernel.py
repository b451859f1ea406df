"""Triton's kernels are interpreted here, and compared with what they stand for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.engine.torch.model.fused import plain_kernels
from services.engine.torch.model.fused.plain_kernels import NormForm, RotaryForm

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half precision: another neighbour in few places; the interpreter cuts bfloat16 off where a GPU rounds.
STEPS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}


@pytest.fixture(scope="module")
def kernels():
    from services.engine.torch.model.fused import fused_kernel

    return fused_kernel.KERNELS


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(given, expected, dtype):
    assert given.shape == expected.shape and given.dtype == dtype
    step = STEPS[dtype] * torch.finfo(dtype).eps
    torch.testing.assert_close(given.double(), expected.double(), rtol=step, atol=step)


def rows_in_all_orders(dtype, width):
    product = random(1, 5, 9 * width, dtype=dtype)
    heads = product[..., width : 5 * width].view(1, 5, 4, width)
    return {
        "dense": product[..., :width].contiguous(),
        "a part of a product": product[..., width : 2 * width],
        "heads": heads,
        "heads before tokens": heads.transpose(1, 2),
        "one token": heads[:, :1],
        "one head": heads[:, :, 2:3],
        "many dimensions": random(3, 2, 4, 2 * width, dtype=dtype).transpose(0, 2)[..., :width],
        "columns apart": random(1, 5, 2 * width, dtype=dtype)[..., ::2],
        "none": product[:, :0, :width],
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_norms_rows_however_they_lie(kernels, subtests, dtype):
    for width in (16, 40, 300, 21):
        weight = random(width, dtype=dtype, seed=1)
        for order, rows in rows_in_all_orders(dtype, width).items():
            for adds_one, rounds_first, own in [
                *[(False, True, weight), (False, False, weight), (True, False, weight), (False, True, None)]
            ]:
                with subtests.test(order, width=width, adds_one=adds_one, rounds_first=rounds_first):
                    form = NormForm(1e-5, adds_one, rounds_first)
                    normed = kernels.normalize(rows, own, form)
                    assert_near(normed, plain_kernels.normalize(rows, own, form), dtype)
                    wide = plain_kernels.normalize(rows.double(), None if own is None else own.double(), form)
                    assert_near(normed, wide, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_adds_as_it_would_before_a_norm(kernels, subtests, dtype):
    for width in (16, 300, 21):
        weight, rows = random(width, dtype=dtype, seed=1), random(1, 5, 2 * width, dtype=dtype)
        first, second = (each.contiguous() for each in rows.split(width, -1))
        for adds_one, rounds_first, own in [
            *[(False, True, weight), (False, False, weight), (True, False, weight), (False, True, None)]
        ]:
            with subtests.test(width=width, adds_one=adds_one, rounds_first=rounds_first):
                form, total = NormForm(1e-5, adds_one, rounds_first), torch.empty_like(first)
                normed = kernels.add_and_normalize(first, second, total, own, form)
                assert_near(total, first + second, dtype)
                assert torch.equal(normed, kernels.normalize(total, own, form))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_rotates_heads_of_a_product(kernels, subtests, dtype):
    for heads, kv_heads, dim, half, has_own in [
        *[(4, 2, 16, 8, True), (5, 1, 20, 10, True), (20, 10, 128, 64, True), (7, 3, 24, 4, True)],
        *[(4, 4, 16, 8, False), (2, 1, 80, 40, True), (3, 3, 256, 32, True), (5, 0, 16, 8, True)],
    ]:
        for total in (1, 3):
            with subtests.test(heads=heads, kv_heads=kv_heads, dim=dim, half=half, total=total):
                product = random(1, total, (heads + kv_heads) * dim + 8, dtype=dtype)
                query = product[..., : heads * dim].view(1, total, heads, dim).transpose(1, 2)
                key = product[..., heads * dim : -8].view(1, total, kv_heads, dim).transpose(1, 2)
                if total == 3:
                    key = key.contiguous()
                angles = 2 * half if has_own else half
                cos, sin = (
                    random(1, total, angles, dtype=dtype, seed=1),
                    random(1, total, angles, dtype=dtype),
                )
                form = RotaryForm(half, has_own)
                rotated = kernels.rotate(query, key, cos, sin, form)
                for given, expected in zip(
                    rotated, plain_kernels.rotate(query, key, cos, sin, form), strict=True
                ):
                    assert given.transpose(1, 2).is_contiguous()
                    assert_near(given, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_activates_a_gate_beside_what_it_gates(kernels, subtests, dtype):
    for width in (16, 1040, 1024, 21):
        for activation in ("silu", "gelu_tanh"):
            with subtests.test(activation, width=width):
                gate, up = random(1, 3, 2 * width, dtype=dtype).split(width, -1)
                given = kernels.activate(gate, up, activation)
                assert given.is_contiguous()
                assert_near(given, plain_kernels.activate(gate, up, activation), dtype)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_gpus_once_whatever_a_step_looks_like(capability, tmp_path):
    """A process of its own compiles, for what is interpreted cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "compile_fused_kernels.py", str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *counts, num_fused = done.stdout.splitlines()
    assert counts == ["3 3 2 1"] * 6
    # Before Hopper each product and each sum of bfloat16 is one that multiplies and adds.
    assert num_fused == "0" or capability < 90
