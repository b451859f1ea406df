"""Two Triton kernels of the hand-written loop, each for what torch takes several launches for."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    heads, cos, sin, rotated, row_stride, head_stride, num_heads, HALF: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (i, j) is head j of row i; `rotated` is contiguous."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    mask = columns < HALF
    at = heads + row * row_stride + head * head_stride + columns
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    by_cos = tl.load(cos + columns, mask=mask, other=0.0).to(tl.float32)
    by_sin = tl.load(sin + columns, mask=mask, other=0.0).to(tl.float32)
    to = rotated + (row * num_heads + head) * 2 * HALF + columns
    tl.store(to, first * by_cos - second * by_sin, mask=mask)
    tl.store(to + HALF, second * by_cos + first * by_sin, mask=mask)


@triton.jit
def _activate(gate_up, activated, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(activated + row * WIDTH + columns, gate / (1 + tl.exp(-gate)) * up, mask=mask)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [rows, num_heads, head_dim], whose last dimension is contiguous."""
    num_rows, num_heads, head_dim = heads.shape
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    _rotate[num_rows, num_heads](
        heads,
        cos,
        sin,
        output,
        heads.stride(0),
        heads.stride(1),
        num_heads,
        HALF=head_dim // 2,
        COLUMNS=triton.next_power_of_2(head_dim // 2),
    )
    return output


def activated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) x up of contiguous rows [rows, 2 x width]."""
    width = gate_up.shape[1] // 2
    output = gate_up.new_empty(len(gate_up), width)
    block = min(1024, triton.next_power_of_2(width))
    _activate[len(gate_up), triton.cdiv(width, block)](gate_up, output, WIDTH=width, BLOCK=block)
    return output
