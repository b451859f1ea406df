"""Products of floats of 8 bits are torch's: rows of activations are rounded, and a weight lies ready.

RowProduct     a scale for each row of the weight, and for each row of activations
BlockProduct   a scale for each 128 x 128 of the weight, and for each 128 of a row (on Hopper, by cuBLAS)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

Round = Callable[[Tensor], tuple[Tensor, Tensor]]

BLOCK = 128
STEP = 16  # Widths are multiples of it.
_SCALES_STEP = 4  # cuBLAS wants so many blocks along a row, and reads none of what is filled up.
_LARGEST, _SMALLEST = 448.0, 1e-12


@dataclass(frozen=True, slots=True)
class RowWeight:
    numbers: Tensor  # [num_rows filled up, depth]
    scales: Tensor  # float32 [1, num_rows filled up]
    num_rows: int

    @property
    def depth(self) -> int:
        return int(self.numbers.shape[1])

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Tensor, Tensor]], num_rows: int, depth: int) -> "RowWeight":
        """Make it of parts, each from a row on: numbers [rows, depth], and a scale for each or for all."""
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
    row_step: int = 1  # Rows are filled up to a multiple of it.

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
    numbers: Tensor  # [num_rows, depth]
    scales: Tensor  # float32 [blocks of rows, blocks of the depth, filled up]

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
        """Make it of parts, each from a row on. It is None where a part begins within a block."""
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
    row_step: int = 1  # Rows are filled up to a multiple of it.

    def __call__(self, rows: Tensor) -> Tensor:
        flat, num_rows = _filled_up(rows, self.row_step)
        product = multiply_blocks(*self.round_groups(flat), self.weight)[:num_rows]
        product = product.view(*rows.shape[:-1], self.weight.num_rows).to(rows.dtype)
        return product if self.bias is None else product + self.bias.to(rows.dtype)


def _filled_up(rows: Tensor, step: int) -> tuple[Tensor, int]:
    """Return the rows in two dimensions, filled up, and how many they were."""
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

    The scales of one group lie one after another.
    """
    numbers, scales = round_rows_plainly(rows.reshape(-1, BLOCK))
    return numbers.view(rows.shape), scales.view(len(rows), -1).t().contiguous().t()
