"""Linear layers for the CPU keep their weights in the order in which they are read.

A PanelLinear is for one thread and float32: a kernel that numba compiles multiplies its panels. Otherwise a
PackedLinear has oneDNN's order, as oneDNN shares the work among torch's threads and knows the processor's
bfloat16 instructions. A BLAS would pack a plain weight again in every call, which for the few rows of a
decode step takes twice as long as reading the weight once.

`pack(weight)` lays the matrix out once as panels, each a stretch of memory that is read from end to end.
`multiply(...)` takes each panel and each tile of up to 12 rows, and sums all their products with the panel's
columns in registers; meanwhile the first tile's code fetches the next panel.

For a decode step the matrix is read from memory once and multiplied by several rows at a time. oneDNN and
BLAS read first and multiply then. The kernel overlaps the two, so a larger batch costs nothing more until the
multiplication takes as long as the reads (8 layers of hidden size 512, one thread of a Zen 4 with other load:
1 row 3.8 ms where oneDNN takes 8.2, 9 rows 6.1 and 8.6, 24 rows 11.9 and 15). A row's products do not depend
on the number of rows. The kernel uses one thread: with more, oneDNN is faster at prompts (of 512 rows it does
110 GFLOP/s with one thread, and this kernel 101).
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

# These are the lanes of a vector and the rows of a tile; two vectors of sums per row must fit in the
# registers.
_LANES, _TILE_ROWS = (16, 12) if get_host_cpu_features().get("avx512f") else (8, 6)
_COLUMNS = 2 * _LANES  # A panel is two vectors wide.
# A single tile waits for memory. The processor itself prefetches up to the end of a 4 KiB memory page and
# starts again in the next one. With a prefetch two such pages ahead, 75 MB are read in 6.1 ms instead of 7.6.
_NUMBERS_AHEAD = 2048
# So many rows at a time stay in the second-level cache beside a panel while all panels are read.
_BLOCK_ROWS = 8 * _TILE_ROWS

_compiled = compiled()
_inner = inner()


class Panels(NamedTuple):
    """The panels hold a weight [num_columns, depth] and a bias, both padded with zeros."""

    numbers: Floats  # The shape is [num_panels, depth, columns of a panel], flat.
    bias: Floats  # The shape is [num_panels * columns of a panel].
    depth: int
    num_columns: int


def pack(weight: Floats, bias: Floats | None) -> Panels:
    """Pack an nn.Linear's `weight` [num_columns, depth] and `bias` [num_columns]."""
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
    # The rows are made contiguous, since numba would compile the kernel again for other strides.
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
    if num_tiles == 1:  # A prefetch past the last panel reads nothing.
        return here + _NUMBERS_AHEAD, _COLUMNS
    if tile > 1 or panel + 1 == num_panels:
        return here, 0
    return here + (_COLUMNS + tile * _LANES) * depth, _LANES


@_inner
def _tiled(rows: Any, depth: Any, first_row: Any, end_row: Any, tile_rows: Any) -> Any:
    """Return the rows tile by tile: for each column, the numbers of all rows of the tile.

    Copies of the last row fill the last tile.
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


# oneDNN chooses the order for so many rows. Its order for one row would be wrong for all other numbers.
_TYPICAL_ROWS = 16
# oneDNN compiles code for every number of rows and keeps that of the last 1,024 shapes. With prompts of all
# lengths that takes 0.7 GB, and 0.6 ms for each new shape. So numbers of rows above the first of these are
# padded to a multiple of the second; the steps are finer for batches, where every row costs time.
_ROW_STEPS = ((64, 16), (16, 4))
# torch's activations compute so many numbers at once. Other widths leave gaps between rows: without gaps, the
# last numbers would be computed by another formula, and their count would depend on the number of rows.
_COLUMN_STEP = 64
# In an order for many rows, fewer rows than these take longer (8 layers of hidden size 512, two threads: one
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

    __call__ = forward  # It has no hooks, and nn.Module's own call takes as long as the rest.


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
    """Replace every linear layer below `module`, except those in `keep`, whose weights other code reads.

    Layers that this torch or processor cannot pack stay. `num_threads` is torch's number of threads. Panels
    are stored in `weights`, if it is given.
    """
    for name, child in module.named_children():
        if type(child) is not nn.Linear:  # A subclass computes something else (Llama 4's router).
            pack_linears(child, num_threads, keep, weights)
        elif child not in keep:
            setattr(module, name, packed(child, num_threads, weights))


def packed(linear: nn.Linear, num_threads: int, weights: SharedWeights | None = None) -> nn.Module:
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
