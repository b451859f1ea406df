"""Linear layers for the CPU keep their weights in the order in which they are read.

    PanelLinear    with one thread and float32: panels, which a kernel that numba compiles multiplies
    PackedLinear   else oneDNN's order, for it shares the work among torch's threads and knows what the
                   processor can do with bfloat16

A plain weight goes to a BLAS that packs it anew in every call: for the few rows of a decode step that takes
twice as long as reading the weight once.

    pack(weight)   once: the matrix as panels, each a stretch of memory that is read from end to end
    multiply(...)  for each panel, for each tile of up to 12 rows: all of their products with the panel's
                   columns are summed in registers; the first tile's fetch the next panel meanwhile

For the few rows of a decode step the matrix is read from memory once and multiplied by several rows at a
time. oneDNN and BLAS do one after the other: here it is done at once, so that a larger batch is free until
the processor has as much to multiply as the memory to read (8 layers of hidden size 512, one thread of a Zen
4 with others at work: 1 row 3.8 ms where oneDNN takes 8.2, 9 rows 6.1 and 8.6, 24 rows 11.9 and 15). A row's
products do not depend on how many rows there are. It is one thread's work: with more of them oneDNN, which
shares torch's, is faster at prompts (of 512 rows it does 110 GFLOP/s with one, this 101).
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from services.engine.torch.compiled import compiled, inner
from services.engine.torch.shared_weights import SharedWeights
from services.engine.torch.vector_lanes import multiply_tile, zeros

Floats = NDArray[np.float32]

# A vector has so many lanes, a tile so many rows: two vectors of sums a row must find place in the registers.
_LANES, _TILE_ROWS = (16, 12) if get_host_cpu_features().get("avx512f") else (8, 6)
_COLUMNS = 2 * _LANES  # a panel has two vectors
# A single tile waits for memory. By itself the processor fetches up to the end of a memory page of 4 KiB, and
# begins anew in the next one: asked for two such pages ahead, 75 MB are read in 6.1 ms instead of 7.6.
_NUMBERS_AHEAD = 2048
# So many rows at a time stay in the second cache beside a panel, while the panels pass by.
_BLOCK_ROWS = 8 * _TILE_ROWS

_compiled = compiled()
_inner = inner()


class Panels(NamedTuple):
    """The panels hold a weight [num_columns, depth] and a bias, both filled up with zeros."""

    numbers: Floats  # [num_panels, depth, columns of a panel], flat
    bias: Floats  # [num_panels * columns of a panel]
    depth: int
    num_columns: int


def pack(weight: Floats, bias: Floats | None) -> Panels:
    """Pack what an nn.Linear has: `weight` [num_columns, depth], `bias` [num_columns]."""
    num_columns, depth = weight.shape
    num_panels = -(-num_columns // _COLUMNS)
    numbers = np.zeros((num_panels * _COLUMNS, depth), np.float32)
    numbers[:num_columns] = weight
    added = np.zeros(num_panels * _COLUMNS, np.float32)
    if bias is not None:
        added[:num_columns] = bias
    panels = numbers.reshape(num_panels, _COLUMNS, depth).transpose(0, 2, 1)
    return Panels(np.ascontiguousarray(panels).reshape(-1), added, depth, num_columns)


def multiply(rows: Floats, panels: Panels) -> Floats:
    """Return each of `rows` [.., depth] times the weight, plus the bias: [.., num_columns]."""
    product = np.empty((*rows.shape[:-1], len(panels.bias)), np.float32)
    # Rows are made contiguous: for views in another order the kernel would be compiled anew.
    flat = np.ascontiguousarray(rows).reshape(-1)
    _multiply(flat, panels.numbers, panels.bias, product.reshape(-1), panels.depth)
    return product if product.shape[-1] == panels.num_columns else product[..., : panels.num_columns]


@_compiled
def _multiply(rows: Any, numbers: Any, bias: Any, product: Any, depth: Any) -> None:
    num_rows, num_panels = len(rows) // depth, len(bias) // _COLUMNS
    for first_row in range(0, num_rows, _BLOCK_ROWS):
        end_row = min(first_row + _BLOCK_ROWS, num_rows)
        num_tiles = -(-(end_row - first_row) // _TILE_ROWS)
        tile_rows = -(-(end_row - first_row) // num_tiles)
        tiles = _tiled(rows, depth, first_row, end_row, tile_rows)
        for panel in range(num_panels):
            for tile in range(num_tiles):
                at_row = first_row + tile * tile_rows
                ahead, step = _ahead(panel, tile, num_panels, num_tiles, depth)
                _multiply_tile(
                    tile_rows,
                    tiles,
                    tile * depth * tile_rows,
                    depth,
                    numbers,
                    panel * depth * _COLUMNS,
                    bias,
                    panel * _COLUMNS,
                    product,
                    at_row * len(bias) + panel * _COLUMNS,
                    (len(bias), min(tile_rows, end_row - at_row) - 1),
                    (ahead, step),
                )


@_inner
def _ahead(panel: Any, tile: Any, num_panels: Any, num_tiles: Any, depth: Any) -> Any:
    here = panel * depth * _COLUMNS
    if num_tiles == 1:  # nothing is read past the last panel, though it is asked for
        return here + _NUMBERS_AHEAD, _COLUMNS
    if tile > 1 or panel + 1 == num_panels:
        return here, 0
    return here + (_COLUMNS + tile * _LANES) * depth, _LANES


@_inner
def _tiled(rows: Any, depth: Any, first_row: Any, end_row: Any, tile_rows: Any) -> Any:
    """Return the rows tile by tile: for each number of a row, those of all rows of the tile.

    The last row fills the last tile up.
    """
    num_tiles = -(-(end_row - first_row) // tile_rows)
    tiles = np.empty(num_tiles * depth * tile_rows, np.float32)
    for tile in range(num_tiles):
        for i in range(tile_rows):
            row = min(first_row + tile * tile_rows + i, end_row - 1)
            to = tile * depth * tile_rows + i
            for k in range(depth):
                tiles[to + k * tile_rows] = rows[row * depth + k]
    return tiles


@_inner
def _multiply_tile(
    num_rows: Any,
    tiles: Any,
    tile: Any,
    depth: Any,
    numbers: Any,
    panel: Any,
    bias: Any,
    added: Any,
    product: Any,
    to: Any,
    kept: Any,
    ahead: Any,
) -> None:
    zero = zeros(_LANES)
    if num_rows == 1:
        multiply_tile(1, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 2:
        multiply_tile(2, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 3:
        multiply_tile(3, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 4:
        multiply_tile(4, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 5:
        multiply_tile(5, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 6:
        multiply_tile(6, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 7:
        multiply_tile(7, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 8:
        multiply_tile(8, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 9:
        multiply_tile(9, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 10:
        multiply_tile(10, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 11:
        multiply_tile(11, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)
    elif num_rows == 12:
        multiply_tile(12, tiles, tile, depth, numbers, panel, bias, added, product, to, kept, zero, ahead)


# So many rows are expected when oneDNN chooses the order. For one row it would be another, and wrong for all
# others.
_TYPICAL_ROWS = 16
# oneDNN compiles code for every number of rows and keeps that of the last 1,024 shapes: with prompts of all
# lengths it takes 0.7 GB, and 0.6 ms for each new shape. So more rows than the first of these are filled up
# to a multiple of the second; less coarsely for batches, where every row is felt.
_ROW_STEPS = ((64, 16), (16, 4))
# torch's activations compute so many numbers at once. Rows of other widths have gaps between: as one stretch
# of memory they would end in numbers that are computed by another formula, and how many there are decides
# which.
_COLUMN_STEP = 64
# In an order made for many rows fewer take longer than these (8 layers of hidden size 512, two threads: one
# row takes 6.1 ms, four take 5.1).
_FEWEST_ROWS = 4


class PanelLinear(nn.Module):
    """This computes what a float32 nn.Linear does, and keeps no weight in the usual order."""

    def __init__(self, linear: nn.Linear, weights: SharedWeights | None = None) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().numpy()
        panels = pack(linear.weight.detach().numpy(), bias)
        if weights is not None:
            panels = panels._replace(numbers=weights.shared(panels.numbers.view(np.uint8)).view(np.float32))
        self._panels = panels

    def forward(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(multiply(rows.numpy(), self._panels))

    __call__ = forward  # nobody hooks it, and a module's own takes as long as the rest of the call


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        extra = -linear.out_features % _COLUMN_STEP
        weight = pad(linear.weight.detach(), (0, 0, 0, extra))
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else pad(linear.bias.detach(), (0, extra))
        self._num_columns = linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[-2]
        step = next((step for more_than, step in _ROW_STEPS if num_rows > more_than), 1)
        extra = max(-num_rows % step, _FEWEST_ROWS - num_rows)
        if extra:
            rows = pad(rows, (0, 0, 0, extra))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product[..., :num_rows, : self._num_columns]


def pack_linears(
    module: nn.Module,
    num_threads: int,
    keep: Collection[nn.Module] = (),
    weights: SharedWeights | None = None,
) -> None:
    """Replace every linear layer below `module` but those to `keep`, whose weights somebody reads.

    Nothing happens where this torch or processor cannot. `num_threads` is how many torch has. Panels are kept
    in `weights`, if there are some.
    """
    for name, child in module.named_children():
        if type(child) is not nn.Linear:  # a subclass computes something else (Llama 4's router)
            pack_linears(child, num_threads, keep, weights)
        elif child not in keep:
            setattr(module, name, _packed(child, num_threads, weights))


def _packed(linear: nn.Linear, num_threads: int, weights: SharedWeights | None) -> nn.Module:
    weight = linear.weight
    if num_threads == 1 and weight.device.type == "cpu" and weight.dtype == torch.float32:
        return PanelLinear(linear, weights)
    return PackedLinear(linear) if _can_pack(weight) else linear


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)
