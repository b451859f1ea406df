"""A step of single tokens is written into buffers that stay where they are, so that it can be replayed.

    fill    plans a step on the host (view_step's own plan) and copies it to the device, in one copy
    view    is what attention and mixers read in every such step: slices of the buffers

A step of fewer rows than there are is filled up by echoes of its first row: they have its token, its position
and what it reads, and store what it stores, in the same place. So they read no KV of their own, and route to
no experts of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.runner import Chunk
from services.engine.torch.attention.kernels.numba_kernel import PagePieces
from services.engine.torch.attention.kernels.piece_parts import (
    OnDevice,
    PartsView,
    PieceParts,
    cut_pieces,
    rows_of,
)
from services.engine.torch.attention.kernels.pieces import pieces_of
from services.engine.torch.attention.kernels.store_kernel import Slots
from services.engine.torch.attention.layers import PagedLayers, Reach
from services.engine.torch.attention.step_view import ReachView, read_of, stored_slots
from services.engine.torch.model.step_cache import TokenRows
from services.engine.torch.model.token_runs import TokenRuns
from services.engine.torch.pools import Pools

# The parts' outputs of one layer take so many bytes at most where rows share many pages; a step that needs
# more is computed without buffers.
_OUTPUT_BYTES = 64 << 20
_NO_SLOTS = Slots(*(np.empty(0, np.int64) for _ in Slots._fields))


@dataclass(frozen=True, slots=True)
class _Plan:
    pieces: PagePieces
    parts: PieceParts


@dataclass(frozen=True, slots=True)
class _Room:
    """A reach has room for so much of a step; PartsView says what each is."""

    grid: tuple[int, int]
    num_pages: int
    num_outputs: int  # readings, too, and readers


class Outputs:
    """The outputs of parts lie in this memory, those of all layers, reaches and buffers in turn."""

    def __init__(self, layers: PagedLayers, num_rows: int, device: torch.device) -> None:
        """Allocate it for buffers of up to `num_rows` rows."""
        sizes = [
            (_room(layers, reach, num_rows).num_outputs * on_device(layers, reach).num_heads, reach)
            for reach in layers.reaches
        ]
        num_log_sums = max(size for size, _ in sizes)
        num_numbers = max(size * layers.pools[reach.pool].shape.v_head_dim for size, reach in sizes)
        self.numbers = torch.zeros(num_numbers, dtype=torch.float32, device=device)
        self.log_sums = torch.zeros(num_log_sums, dtype=torch.float32, device=device)


class _Areas:
    """Named runs of integers lie one after the other in one run of bytes, on the host and on the device."""

    def __init__(self, sizes: Mapping[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        lengths = [size * dtype.itemsize for dtype, size in sizes.values()]
        ends = list(accumulate(-(-length // 8) * 8 for length in lengths))
        pinned = device.type == "cuda"
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self.host: dict[str, NDArray[np.integer]] = {}
        self.device: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        for (name, (dtype, _)), length, start in zip(sizes.items(), lengths, [0, *ends], strict=False):
            place = slice(start, start + length)
            self._starts[name] = start
            self.host[name] = self._host[place].view(dtype).numpy()
            self.device[name] = self._device[place].view(dtype)

    def copy(self, last: str, count: int) -> None:
        """Copy all areas up to the first `count` numbers of `last`, which no other one follows."""
        end = self._starts[last] + count * self.host[last].itemsize
        self._device[:end].copy_(self._host[:end], non_blocking=True)


class StepBuffers:
    """The buffers are of `num_rows` rows. They are filled and read on one thread and one stream.

    The one that fills them again waits first until the device has read what was filled before (finish_step).
    """

    def __init__(self, pools: Pools, num_rows: int, outputs: Outputs) -> None:
        self.num_rows = num_rows
        self._layers, device = pools.layers, outputs.numbers.device
        self._has_slots = pools.slots is not None
        self._pool_ids = sorted({reach.pool for reach in self._layers.reaches})
        self._rooms = {reach: _room(self._layers, reach, num_rows) for reach in self._layers.reaches}
        self._areas = _Areas(self._sizes(), device)
        self.rows = torch.arange(num_rows, device=device)  # int64
        self.views = {reach: self._view(nth, reach, outputs) for nth, reach in enumerate(self._rooms)}

    @property
    def token_ids(self) -> Tensor:
        """Return int64 [num_rows]."""
        return self._areas.device["token_ids"]

    @property
    def positions(self) -> Tensor:
        """Return int64 [num_rows]."""
        return self._areas.device["positions"]

    @property
    def tokens(self) -> TokenRows | None:
        """Return how mixers compute the rows; None where the model has none."""
        if not self._has_slots:
            return None
        each = np.arange(self.num_rows)
        runs = TokenRuns(
            self._areas.device["state_slots"], each, np.ones_like(each), np.zeros(len(each), np.bool)
        )
        return TokenRows(self.rows, runs)

    def fill(self, chunks: Sequence[Chunk]) -> bool:
        """Write a step of single tokens, one a row, and launch its copy to the device.

        Return False where it does not fit, or no row stores what it computes. Raises ProtocolError as
        view_step does.
        """
        stored = {pool: stored_slots(pool, chunks, self._layers.pools[pool]) for pool in self._pool_ids}
        if not 0 < len(chunks) <= self.num_rows or not all(len(slots.rows) for slots in stored.values()):
            return False
        plans = {reach: self._plan(reach, chunks) for reach in self._rooms}
        if not all(_fits(plans[reach], room) for reach, room in self._rooms.items()):
            return False
        self._set("token_ids", [chunk.token_ids[0] for chunk in chunks])
        self._set("positions", [chunk.start for chunk in chunks])
        if self._has_slots:
            self._set("state_slots", [chunk.slot for chunk in chunks])
        for pool, slots in stored.items():
            for name, ids in zip(Slots._fields, slots, strict=True):
                self._set(f"stored_{name}{pool}", ids)
        num_pages = 0
        for nth, plan in enumerate(plans.values()):
            self._set_plan(nth, plan, num_pages)
            num_pages += len(plan.pieces.pages)
        self._areas.copy("pages", num_pages)
        return True

    def _sizes(self) -> dict[str, tuple[torch.dtype, int]]:
        wide, narrow, rows = torch.int64, torch.int32, self.num_rows
        sizes = {name: (wide, rows) for name in ("token_ids", "positions")}
        if self._has_slots:
            sizes["state_slots"] = (wide, rows)
        for pool in self._pool_ids:
            sizes |= {f"stored_{name}{pool}": (wide, rows) for name in Slots._fields}
        for nth, room in enumerate(self._rooms.values()):
            sizes |= {
                f"counts{nth}": (narrow, 2),
                f"parts{nth}": (narrow, 7 * sum(room.grid)),
                f"readers{nth}": (narrow, room.num_outputs),
                f"readings{nth}": (narrow, room.num_outputs),
                f"starts{nth}": (narrow, rows),
                f"ends{nth}": (narrow, rows),
            }
        # These come last, and only those that are read are copied.
        return sizes | {"pages": (narrow, sum(room.num_pages for room in self._rooms.values()))}

    def _view(self, nth: int, reach: Reach, outputs: Outputs) -> ReachView:
        kv, room, device = self._layers.pools[reach.pool], self._rooms[reach], self._areas.device
        chosen = on_device(self._layers, reach)
        num_heads, v_head_dim = chosen.num_heads, kv.shape.v_head_dim
        num_log_sums = room.num_outputs * num_heads
        parts = PartsView(
            pages=device["pages"],
            readers=device[f"readers{nth}"],
            parts=device[f"parts{nth}"].view(-1, 7),
            readings=device[f"readings{nth}"],
            starts=device[f"starts{nth}"],
            ends=device[f"ends{nth}"],
            offsets=self.rows.to(torch.int32),
            counts=device[f"counts{nth}"],
            grid=room.grid,
            outputs=outputs.numbers[: num_log_sums * v_head_dim].view(-1, num_heads, v_head_dim),
            log_sums=outputs.log_sums[:num_log_sums].view(-1, num_heads),
            attend=chosen.attend,
        )
        rows, pages, slots = (device[f"stored_{name}{reach.pool}"] for name in Slots._fields)
        return ReachView(
            kv, _NO_SLOTS, (), (), parts, None, static_slots=(rows, pages, slots), store=chosen.store
        )

    def _plan(self, reach: Reach, chunks: Sequence[Chunk]) -> _Plan:
        kv, chosen = self._layers.pools[reach.pool], on_device(self._layers, reach)
        page_size = kv.shape.page_size
        pieces = pieces_of([read_of(chunk, reach, page_size) for chunk in chunks], page_size)
        return _Plan(pieces, cut_pieces(pieces, kv, chosen.num_heads, chosen.num_programs))

    def _set_plan(self, nth: int, plan: _Plan, first_page: int) -> None:
        host, table, joins = self._areas.host, plan.parts.table, plan.parts.joins
        own = host[f"parts{nth}"].reshape(-1, 7)[: len(table)]
        own[:] = table
        own[:, :2] += first_page
        host[f"counts{nth}"][:] = plan.parts.num_narrow, len(table)
        host[f"readers{nth}"][: len(plan.pieces.readers)] = plan.pieces.readers
        host[f"readings{nth}"][: len(joins.readings)] = joins.readings
        self._set(f"starts{nth}", joins.starts[:-1])
        self._set(f"ends{nth}", joins.starts[1:])
        host["pages"][first_page : first_page + len(plan.pieces.pages)] = plan.pieces.pages

    def _set(self, name: str, values: Sequence[int | None] | NDArray[np.integer]) -> None:
        area: NDArray[Any] = self._areas.host[name]
        area[: len(values)] = values
        area[len(values) :] = area[0]


def on_device(layers: PagedLayers, reach: Reach) -> OnDevice:
    chosen = layers.in_place[reach.pool]
    assert isinstance(chosen, OnDevice), "attention gathers"
    return chosen


def _room(layers: PagedLayers, reach: Reach, num_rows: int) -> _Room:
    """Return what `num_rows` rows need at most, however they share pages; outputs apart."""
    kv, chosen = layers.pools[reach.pool], on_device(layers, reach)
    of_a_head = chosen.num_programs // kv.shape.num_kv_heads + 1
    # A tree of rows has fewer inner pieces than rows; a piece is cut once more than there are programs for.
    narrow_rows, group = rows_of(kv, chosen.num_heads)[0], chosen.num_heads // kv.shape.num_kv_heads
    has_wide = num_rows * group > narrow_rows
    grid = of_a_head + 3 * num_rows, of_a_head + num_rows if has_wide else 0
    # Of a page that is being filled, and of one that a window cuts, each row may read another part.
    num_pages = kv.num_pages + 2 * num_rows
    if reach.window:
        num_pages = min(num_pages, num_rows * (reach.window // kv.shape.page_size + 2))
    most = num_rows * (of_a_head + 4)
    fitting = _OUTPUT_BYTES // (4 * chosen.num_heads * kv.shape.v_head_dim)
    return _Room(grid, num_pages, min(most, max(8 * num_rows + 2 * chosen.num_programs, fitting)))


def _fits(plan: _Plan, room: _Room) -> bool:
    num_parts, num_narrow = len(plan.parts.table), plan.parts.num_narrow
    return (
        num_narrow <= room.grid[0]
        and num_parts - num_narrow <= room.grid[1]
        and len(plan.parts.joins.readings) <= room.num_outputs
        and len(plan.pieces.readers) <= room.num_outputs
        and len(plan.pieces.pages) <= room.num_pages
    )
