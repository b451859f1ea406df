"""These products multiply weights of 8 and of 4 bits.

A RowProduct has 8 bits, a scale for each row of the weight, and a scale for each row of activations, which
are rounded. A BlockProduct has 8 bits, a scale for each 128 x 128 block of the weight, and for each 128
numbers of a row (cuBLAS computes it on Hopper). torch multiplies floats of 8 bits.

An Int4Product has 4 bits: it reads a quarter of the bytes, and does not round rows. For up to 64 rows a
kernel unpacks the numbers of 4 bits in registers (stored_kernel.py). For more rows it dequantizes the weight
to the served dtype, and torch multiplies, since prompts are bound by arithmetic.

A weight of 4 bits lies in tiles that a program reads one after another: of 64 rows of the weight, `2 x half`
columns each. A byte has two numbers of one row, `half` columns apart, so that each half is a product of its
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, pad, scaled_mm

from services.engine.torch.quantized.dequantize import Grouped

Round = Callable[[Tensor], tuple[Tensor, Tensor]]

BLOCK = 128
STEP = 16  # Widths are multiples of this.
_SCALES_STEP = 4  # cuBLAS needs a multiple of so many blocks along a row, and does not read the padding.
_LARGEST, _SMALLEST = 448.0, 1e-12


@dataclass(frozen=True, slots=True)
class RowWeight:
    numbers: Tensor  # The shape is [padded num_rows, depth].
    scales: Tensor  # The scales are float32 [1, padded num_rows].
    num_rows: int

    @property
    def depth(self) -> int:
        return int(self.numbers.shape[1])

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Tensor, Tensor]], num_rows: int, depth: int) -> "RowWeight":
        """Build it from parts: a first row, numbers [rows, depth], and a scale for each row or for all."""
        filled_up = -(-num_rows // STEP) * STEP
        device = parts[0][1].device
        numbers = torch.zeros((filled_up, depth), dtype=torch.uint8, device=device)
        scales = torch.ones((1, filled_up), dtype=torch.float32, device=device)
        for begin, part, scale in parts:
            numbers[begin : begin + len(part)] = part.view(torch.uint8)
            scales[0, begin : begin + len(part)] = scale.float().reshape(-1)
        return cls(numbers.view(torch.float8_e4m3fn), scales, num_rows)


@dataclass(frozen=True, slots=True)
class RowProduct:
    weight: RowWeight
    bias: Tensor | None
    round_rows: Round
    row_step: int = 1  # Rows are padded to a multiple of this.

    def __call__(self, rows: Tensor) -> Tensor:
        weight = self.weight
        flat, num_rows = _filled_up(rows, self.row_step)
        numbers, scales = self.round_rows(flat)
        product = torch._scaled_mm(
            numbers,
            weight.numbers.t(),
            scale_a=scales,
            scale_b=weight.scales,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        product = product[:num_rows, : weight.num_rows]
        product = product.view(*rows.shape[:-1], weight.num_rows).to(rows.dtype)
        return product if self.bias is None else product + self.bias.to(rows.dtype)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    numbers: Tensor  # The shape is [num_rows, depth].
    scales: Tensor  # The scales are float32 [blocks of rows, padded blocks of the depth].

    @property
    def num_rows(self) -> int:
        return len(self.numbers)

    @property
    def depth(self) -> int:
        return int(self.numbers.shape[1])

    @classmethod
    def of(
        cls, parts: Sequence[tuple[int, Tensor, Tensor]], num_rows: int, depth: int
    ) -> "BlockWeight | None":
        """Build it from parts, each with its first row; return None where a part begins within a block."""
        if num_rows % STEP or depth % BLOCK or any(begin % BLOCK for begin, _, _ in parts):
            return None
        device = parts[0][1].device
        numbers = torch.zeros((num_rows, depth), dtype=torch.uint8, device=device)
        blocks = depth // BLOCK
        filled_up = -(-blocks // _SCALES_STEP) * _SCALES_STEP
        scales = torch.zeros((-(-num_rows // BLOCK), filled_up), dtype=torch.float32, device=device)
        for begin, part, scale in parts:
            numbers[begin : begin + len(part)] = part.view(torch.uint8)
            first = begin // BLOCK
            scales[first : first + len(scale), :blocks] = scale.float()
        return cls(numbers.view(torch.float8_e4m3fn), scales)


@dataclass(frozen=True, slots=True)
class BlockProduct:
    weight: BlockWeight
    bias: Tensor | None
    round_groups: Round
    row_step: int = 1  # Rows are padded to a multiple of this.

    def __call__(self, rows: Tensor) -> Tensor:
        flat, num_rows = _filled_up(rows, self.row_step)
        product = multiply_blocks(*self.round_groups(flat), self.weight)[:num_rows]
        product = product.view(*rows.shape[:-1], self.weight.num_rows).to(rows.dtype)
        return product if self.bias is None else product + self.bias.to(rows.dtype)


def _filled_up(rows: Tensor, step: int) -> tuple[Tensor, int]:
    flat = rows.reshape(-1, rows.shape[-1])
    extra = -len(flat) % step
    return (pad(flat, (0, 0, 0, extra)) if extra else flat.contiguous()), len(flat)


def multiply_blocks(numbers: Tensor, scales: Tensor, weight: BlockWeight) -> Tensor:
    return scaled_mm(
        numbers,
        weight.numbers.t(),
        scales,
        ScalingType.BlockWise1x128,
        weight.scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def round_rows_plainly(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` as floats of 8 bits, and their scales [n, 1]."""
    numbers = rows.float()
    scales = numbers.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST) / _LARGEST
    rounded = (numbers * (1 / scales)).clamp(-_LARGEST, _LARGEST)
    return rounded.to(torch.float8_e4m3fn), scales


def round_groups_plainly(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, depth] as floats of 8 bits, and the scale of each 128, [n, depth / 128].

    The scales of one group are contiguous.
    """
    numbers, scales = round_rows_plainly(rows.reshape(-1, BLOCK))
    return numbers.view(rows.shape), scales.view(len(rows), -1).t().contiguous().t()


TILE_ROWS = 64
MOST_ROWS = 64
_HALVES = (64, 32, 16)  # The longest that fits is used.
_ROUNDED_GROUP, _ZERO, _SMALLEST_SCALE = 128, 8, 1e-12


@dataclass(frozen=True, slots=True)
class Int4Weight:
    tiles: Tensor  # The tiles are int8 [tiles of rows, steps along the depth, half, TILE_ROWS].
    scales: Tensor  # The scales are float32 [groups, padded rows].
    points: Tensor  # The points are float32, in the shape of the scales.
    num_rows: int
    depth: int

    @property
    def half(self) -> int:
        return int(self.tiles.shape[2])

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Grouped]], num_rows: int, depth: int) -> "Int4Weight | None":
        """Build it from parts, each with its first row; return None where their groups do not fit halves."""
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
    scale = groups.abs().amax(-1).clamp(min=_SMALLEST_SCALE) / _ZERO
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
