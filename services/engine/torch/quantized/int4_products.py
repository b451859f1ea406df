"""Products with weights of 4 bits, which stay so: a quarter of the bytes is read, rows are not rounded.

    up to 64 rows   a kernel takes the numbers apart in registers (int4_kernel.py)
    more            it writes the weight in the served dtype, and torch multiplies: prompts are bound by that

A weight lies in tiles that a program reads one after another: of 64 rows of the weight, `2 x half` columns
each. A byte has two numbers of one row, `half` columns apart, so that each half is a product of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import linear

from services.engine.torch.quantized.dequantize import Grouped

TILE_ROWS = 64
MOST_ROWS = 64
_HALVES = (64, 32, 16)  # The longest that fits is taken.
_ROUNDED_GROUP, _ZERO, _SMALLEST = 128, 8, 1e-12


@dataclass(frozen=True, slots=True)
class Int4Weight:
    tiles: Tensor  # int8 [tiles of rows, steps along the depth, half, TILE_ROWS]
    scales: Tensor  # float32 [groups, rows filled up]
    points: Tensor  # float32, as the scales
    num_rows: int
    depth: int

    @property
    def half(self) -> int:
        return int(self.tiles.shape[2])

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Grouped]], num_rows: int, depth: int) -> "Int4Weight | None":
        """Make it of parts, each from a row on; None where their groups do not go into halves."""
        num_groups = {part.scale.shape[-1] for _, part in parts}
        if len(num_groups) > 1 or any(part.bits != 4 or part.groups is not None for _, part in parts):
            return None
        size = depth // min(num_groups)
        half = next((half for half in _HALVES if not size % half and not depth % (2 * half)), None)
        if half is None:
            return None
        filled_up = -(-num_rows // TILE_ROWS) * TILE_ROWS
        device = parts[0][1].scale.device
        values = torch.zeros((filled_up, depth), dtype=torch.uint8, device=device)
        scales, points = torch.zeros((2, num_groups.pop(), filled_up), dtype=torch.float32, device=device)
        for begin, part in parts:
            rows = slice(begin, begin + len(part.values))
            values[rows] = part.values
            scales[:, rows], points[:, rows] = part.scale.t(), part.points.t()
        halves = values.view(-1, TILE_ROWS, depth // (2 * half), 2, half)
        tiles = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).permute(0, 2, 3, 1).contiguous()
        return cls(tiles.view(torch.int8), scales, points, num_rows, depth)


def round_to_int4(weight: Tensor) -> Grouped:
    """Return the nearest numbers of 4 bits, with a scale for each 128 of a row, or for fewer."""
    num_rows, depth = weight.shape
    groups = weight.float().view(num_rows, depth // gcd(depth, _ROUNDED_GROUP), -1)
    scale = groups.abs().amax(-1).clamp(min=_SMALLEST) / _ZERO
    values = ((groups / scale[..., None]).round() + _ZERO).clamp(0, 2 * _ZERO - 1).view(num_rows, depth)
    return Grouped(values.to(torch.uint8), torch.full_like(scale, _ZERO), scale, 4, None)


@dataclass(frozen=True, slots=True)
class Int4Kernels:
    multiply: Callable[[Tensor, Int4Weight], Tensor]
    dequantize: Callable[[Int4Weight, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class Int4Product:
    weight: Int4Weight
    bias: Tensor | None
    kernels: Int4Kernels

    def __call__(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.weight.depth)
        if len(flat) > MOST_ROWS:
            weight = self.kernels.dequantize(self.weight, rows.dtype)
            product = linear(flat, weight, None if self.bias is None else self.bias.to(rows.dtype))
        else:
            product = self.kernels.multiply(flat.contiguous(), self.weight)
            if self.bias is not None:
                product = product + self.bias.to(rows.dtype)
        return product.view(*rows.shape[:-1], self.weight.num_rows)


def multiply_plainly(rows: Tensor, weight: Int4Weight) -> Tensor:
    product = rows.float() @ _floats(weight).t()
    return product.to(rows.dtype)


def dequantize_plainly(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    return _floats(weight).to(dtype)


PLAIN = Int4Kernels(multiply_plainly, dequantize_plainly)


def _floats(weight: Int4Weight) -> Tensor:
    bytes_ = weight.tiles.view(torch.uint8).permute(0, 3, 1, 2)
    values = torch.stack((bytes_ & 15, bytes_ >> 4), 3).flatten(2).flatten(0, 1).float()
    size = weight.depth // len(weight.scales)
    scales, points = (each.t().repeat_interleave(size, 1) for each in (weight.scales, weight.points))
    return ((values - points) * scales)[: weight.num_rows]
