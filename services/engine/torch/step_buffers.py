"""A step is written into buffers with fixed addresses, so that it can be replayed.

In the rows, single tokens come first, then tokens of prompts. `fill` plans a step on the host (view_step's
own plan) and copies it to the device in one copy. `views` are slices of the buffers that attention and mixers
read in every such step.

A step with too few rows is padded with copies of its first row, which have its token and its position. Copies
of single tokens read what that one reads, so they read no KV and use no experts of their own, and leave the
same state. Copies among prompts, and over latents, attend to nothing, but over latents get the first row's
output where there are states. The KV of copies is not stored: the first entry of what is stored is repeated
instead.

Most steps have the sequences of the last one, each with one more token, in the same pages or a new one. Such
a step changes the last plan instead of making its own; what it writes is the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.cpu_attention_kernel import Slots
from services.engine.torch.attention.page_pieces import (
    GrowingPieces,
    Outline,
    PartsView,
    PieceParts,
    cut_pieces,
    outline_of,
    pieces_of,
)
from services.engine.torch.attention.prompts import PackedChunks, PackedView, PlacedRead, tables_of
from services.engine.torch.attention.step_view import (
    Reach,
    ReachView,
    page_of,
    place_reads,
    read_of,
    stored_slots,
)
from services.engine.torch.model.step_cache import SequenceRows, TokenRounds, TokenRows, TokenRuns
from services.engine.torch.pools import Pools
from services.engine.torch.step_rooms import (
    PiecesPlan,
    RunRoom,
    StepOutputs,
    StepRoom,
    fits,
    is_latent,
    on_device,
    room_of,
)

_NO_SLOTS = Slots(*(np.empty(0, np.int64) for _ in Slots._fields))


@dataclass(slots=True)
class _Kept:
    """This is the last step: single tokens of sequences that have nothing but these in a step.

    A step that goes on with them reads one slot more of each, in the same pages or the next.
    """

    tables: list[object]
    next_starts: list[int]
    pages: NDArray[np.int64]  # These are the pages that the tokens are stored in.
    growing: dict[Reach, GrowingPieces]


class _Areas:
    """Named runs of integers lie one after the other in one allocation, on the host and on the device."""

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
        """Copy all areas up to the first `count` numbers of `last`, which is the last area."""
        end = self._starts[last] + count * self.host[last].itemsize
        self._device[:end].copy_(self._host[:end], non_blocking=True)


class StepBuffers:
    """There are rows for `num_singles` single tokens, followed by rows for prompts.

    The buffers are filled and read on one thread and one stream. Before they are filled again, the caller
    waits until the device has read them (finish_step).
    """

    def __init__(self, pools: Pools, room: StepRoom, outputs: StepOutputs) -> None:
        self.room, self.num_singles, self.prompts = room, room.num_singles, room.prompts
        self.num_rows, self.num_kept = room.num_singles + room.num_tokens, room.num_kept
        self._layers, device = pools.layers, outputs.numbers.device
        self._has_slots = pools.slots is not None
        self._pool_ids = sorted({reach.pool for reach in self._layers.reaches})
        # Latents come last, and have no plans.
        reaches = sorted(self._layers.reaches, key=lambda reach: is_latent(self._layers, reach))
        self._rooms = {reach: room_of(self._layers, reach, room.num_singles) for reach in reaches}
        self._planned = [reach for reach in reaches if not is_latent(self._layers, reach)]
        self._has_sources = self._has_slots and self.num_singles > 0 and len(self._planned) < len(reaches)
        self._areas = _Areas(self._sizes(), device)
        num_runs = room.runs.num_runs if room.runs is not None else 0
        # These are copied when the device may not have read the others yet.
        self._counts = _Areas({"counts": (torch.int64, num_runs)}, device)
        self._arange = torch.arange(self.num_rows, device=device)
        self._kept: _Kept | None = None
        self.takes: list[Callable[[], object]] = []  # The last pass of the model left these (StepCache).
        self.views = {reach: self._view(nth, reach, outputs) for nth, reach in enumerate(self._rooms)}

    @property
    def token_ids(self) -> Tensor:
        """The shape is int64 [num_rows]."""
        return self._areas.device["token_ids"]

    @property
    def keeps_some(self) -> bool:
        return self.room.num_tokens > 0

    @property
    def kept(self) -> Tensor | int:
        """These are the rows whose logits are computed, int64 [num_kept]; 0 means all, without prompts."""
        return self._areas.device["kept"] if self.keeps_some else 0

    @property
    def positions(self) -> Tensor:
        """The shape is int64 [num_rows]."""
        return self._areas.device["positions"]

    @property
    def tokens(self) -> TokenRows | None:
        """These are the rows as mixers compute them, or None where the model has no mixers, or with runs."""
        if not self._has_slots or self.room.runs is not None or self.room.is_scan:
            return None
        each = np.arange(self.num_rows)
        runs = TokenRuns(
            self._areas.device["state_slots"], each, np.ones_like(each), np.zeros(len(each), np.bool)
        )
        return TokenRows(self._arange, runs)

    @property
    def sequences(self) -> Sequence[SequenceRows]:
        return (SequenceRows(self._arange, self._areas.device["scan_slot"]),) if self.room.is_scan else ()

    @property
    def rounds(self) -> TokenRounds | None:
        runs, device = self.room.runs, self._areas.device
        if runs is None:
            return None
        rows = device["run_rows"].view(runs.num_tokens, runs.num_runs)
        return TokenRounds(device["run_slots"], rows, device["run_places"], self._counts.device["counts"])

    def take(self) -> None:
        """Update the states with the tokens that `keep` has counted."""
        for take in self.takes:
            take()

    def keep(self, counts: Sequence[int]) -> None:
        """Write how many tokens of each run the states are to include, and launch the copy to the device."""
        host = self._counts.host["counts"]
        host[: len(counts)], host[len(counts) :] = counts, counts[0]
        self._counts.copy("counts", len(host))

    def fill(
        self,
        singles: Sequence[Chunk],
        prompts: Sequence[Chunk] = (),
        kept: Sequence[int] = (),
        runs: Sequence[int] = (),
    ) -> bool:
        """Write a step of single tokens and of prompts, and launch its copy to the device.

        `kept` are the rows whose logits are requested, where there are prompts; rows of prompts count from
        num_singles on. With room for runs, `runs` are the numbers of single tokens of each sequence. Return
        False where the step does not fit, or no row stores its KV. Raises
        ProtocolError as view_step does.
        """
        if not prompts and self._go_on(singles):
            return True
        self._kept = None
        chunks = [*singles, *prompts]
        stored = {pool: stored_slots(pool, chunks, self._layers.pools[pool]) for pool in self._pool_ids}
        num_tokens = sum(len(chunk.token_ids) for chunk in prompts)
        has_room = len(singles) <= self.num_singles and num_tokens <= self.num_rows - self.num_singles
        if not has_room or not all(len(slots.rows) for slots in stored.values()):
            return False
        if bool(singles) is not bool(self.num_singles) or len(kept) > self.num_kept:
            return False
        if self.room.is_scan and len(prompts) > 1:
            return False
        plans = {reach: self._plan(reach, singles) for reach in self._planned} if singles else {}
        if not all(fits(plan, self._rooms[reach]) for reach, plan in plans.items()):
            return False
        for nth, reach in enumerate(self._rooms):
            gathering = () if reach in self._planned else singles
            if (prompts or gathering) and not self._set_prompts(nth, reach, gathering, prompts):
                return False
        self._set_rows("token_ids", singles, [token_id for chunk in prompts for token_id in chunk.token_ids])
        positions = [np.arange(chunk.start, chunk.end) for chunk in prompts]
        self._set_rows("positions", singles, np.concatenate(positions) if positions else ())
        if self.room.runs is not None:
            self._set_runs(singles, runs, self.room.runs)
        elif self.room.is_scan:
            self._set("scan_slot", [chunk.slot for chunk in prompts])
        elif self._has_slots:
            self._set("state_slots", [chunk.slot for chunk in singles])
        if self._has_sources:
            self._set("sources", np.arange(len(singles)))
        if self.keeps_some:
            self._set("kept", kept or [0])
        for pool, slots in stored.items():
            self._set_stored(pool, slots, len(singles))
        self._areas.copy("pages", self._set_plans(plans.values()))
        if not prompts and not runs and len(plans) == len(self._rooms):
            self._keep(singles, stored[0], plans)
        return True

    def _keep(self, singles: Sequence[Chunk], stored: Slots, plans: Mapping[Reach, PiecesPlan]) -> None:
        tables = [chunk.table for chunk in singles]
        if None in tables or len(set(map(id, tables))) < len(tables) or len(stored.rows) < len(tables):
            return
        growing = {
            reach: GrowingPieces(plan.pieces, plan.parts.table, len(singles))
            for reach, plan in plans.items()
            if plan.pieces is not None and not reach.window
        }
        if all(each.can_grow for each in growing.values()):
            next_starts = [chunk.start + 1 for chunk in singles]
            self._kept = _Kept(tables, next_starts, stored.pages, growing)

    def _go_on(self, singles: Sequence[Chunk]) -> bool:
        """Write a step that goes on where the last one ended; the tables are those of a new plan.

        Return False where it does not, or does not fit.
        """
        kept, page_size = self._kept, self._layers.pools[0].shape.page_size
        if kept is None or len(singles) != len(kept.tables):
            return False
        if not all([chunk.table is table for chunk, table in zip(singles, kept.tables, strict=True)]):
            return False
        starts = [chunk.start for chunk in singles]
        if starts != kept.next_starts:
            return False
        self._kept = None
        slots = [start % page_size for start in starts]
        begins = [row for row, slot in enumerate(slots) if slot == 0]
        if begins or len(kept.growing) < len(self._rooms):
            new_pages = np.full(len(singles), -1)
            for row in begins:
                new_pages[row] = kept.pages[row] = page_of(singles[row], page_size)
            plans = {reach: self._next_plan(reach, kept, new_pages, singles) for reach in self._rooms}
            if not all(fits(plan, self._rooms[reach]) for reach, plan in plans.items()):
                return False
            self._set("stored_pages0", kept.pages)
            for pool in self._pool_ids[1:]:
                self._set_stored(pool, stored_slots(pool, singles, self._layers.pools[pool]), len(singles))
            num_pages = self._set_plans(plans.values())
        else:
            for nth, growing in enumerate(kept.growing.values()):
                self._areas.host[f"parts{nth}"].reshape(-1, 7)[growing.grow_in_place(), 6] += 1
            num_pages = 0
        self._set("token_ids", [chunk.token_ids[0] for chunk in singles])
        self._set("positions", starts)
        if self._has_slots:
            self._set("state_slots", [chunk.slot for chunk in singles])
        self._set("stored_slots0", slots)
        self._areas.copy("pages", num_pages)
        kept.next_starts = [start + 1 for start in starts]
        self._kept = kept
        return True

    def _next_plan(
        self, reach: Reach, kept: _Kept, new_pages: NDArray[np.int64], singles: Sequence[Chunk]
    ) -> PiecesPlan:
        if (growing := kept.growing.get(reach)) is None:
            return self._plan(reach, singles)
        growing.grow(new_pages)
        parts = self._cut(reach, growing.outline)
        growing.are_cut(parts.table)
        return PiecesPlan(growing.pages, growing.outline.readers, parts)

    def _set_runs(self, singles: Sequence[Chunk], runs: Sequence[int], room: RunRoom) -> None:
        counts, rounds = np.array(runs), np.arange(room.num_tokens)
        firsts = np.cumsum(counts) - counts
        self._set("run_slots", [singles[first].slot for first in firsts])
        rows = self._areas.host["run_rows"].reshape(room.num_tokens, room.num_runs)
        # Where a run has ended, its last row is computed again.
        rows[:, : len(runs)] = firsts + np.minimum(rounds[:, None], counts - 1)
        rows[:, len(runs) :] = rows[:, :1]
        of_rows = np.repeat(np.arange(len(runs)), counts)
        nths = np.arange(len(singles)) - firsts[of_rows]
        self._set("run_places", nths * room.num_runs + of_rows)

    def _set_stored(self, pool: int, stored: Slots, num_singles: int) -> None:
        shift = self.num_singles - num_singles
        rows = np.where(stored.rows < num_singles, stored.rows, stored.rows + shift)
        for name, ids in zip(Slots._fields, (rows, stored.pages, stored.slots), strict=True):
            self._set(f"stored_{name}{pool}", ids)

    def _set_rows(
        self, name: str, singles: Sequence[Chunk], others: Sequence[int] | NDArray[np.int64]
    ) -> None:
        area: NDArray[Any] = self._areas.host[name]
        own = [chunk.token_ids[0] if name == "token_ids" else chunk.start for chunk in singles]
        area[: len(own)] = own
        area[self.num_singles : self.num_singles + len(others)] = others
        area[len(own) : self.num_singles] = area[0]
        area[self.num_singles + len(others) :] = area[0]

    def _set_prompts(
        self, nth: int, reach: Reach, singles: Sequence[Chunk], prompts: Sequence[Chunk]
    ) -> bool:
        """Write how prompts attend, and before them `singles`, followed by the rows that pad them."""
        room, host, page_size = self.prompts, self._areas.host, self._layers.pools[reach.pool].shape.page_size
        assert room is not None
        ends = np.cumsum([len(chunk.token_ids) for chunk in prompts]).tolist()
        placed = [PlacedRead(0, 1, read_of(chunk, reach, page_size)) for chunk in singles]
        for end, chunk in zip(ends, prompts, strict=True):
            positions, read = range(chunk.start, chunk.end), read_of(chunk, reach, page_size)
            placed += place_reads(end - len(positions), positions, read, reach, page_size)
        row_starts, seen_starts, reads = tables_of(placed, page_size)
        if singles:
            after = len(singles) + 1
            row_starts = np.insert(row_starts, after, len(singles))
            row_starts[after:] += self.num_singles - len(singles)
            seen_starts = np.insert(seen_starts, after, seen_starts[after - 1])
        if len(prompts) > room.num_prompts or seen_starts[-1] > room.num_seen:
            return False
        if len(reads) > len(host[f"reads{nth}"]):
            return False
        for name, starts in ((f"row_starts{nth}", row_starts), (f"seen_starts{nth}", seen_starts)):
            host[name][: len(starts)] = starts
            host[name][len(starts) :] = starts[-1]
        host[f"row_starts{nth}"][-1] = self.num_rows if singles else room.num_tokens
        host[f"reads{nth}"][: len(reads)] = reads
        host[f"reads{nth}"][len(reads) :] = 0
        return True

    def _sizes(self) -> dict[str, tuple[torch.dtype, int]]:
        wide, narrow, rows, singles = torch.int64, torch.int32, self.num_rows, self.num_singles
        sizes = {name: (wide, rows) for name in ("token_ids", "positions")}
        if (runs := self.room.runs) is not None:
            sizes |= {"run_slots": (wide, runs.num_runs), "run_places": (wide, rows)}
            sizes["run_rows"] = (wide, runs.num_runs * runs.num_tokens)
        elif self.room.is_scan:
            sizes["scan_slot"] = (wide, 1)
        elif self._has_slots:
            sizes["state_slots"] = (wide, rows)
        for pool in self._pool_ids:
            sizes |= {f"stored_{name}{pool}": (wide, rows) for name in Slots._fields}
        if self._has_sources:
            sizes["sources"] = (wide, rows)
        if self.keeps_some:
            sizes["kept"] = (wide, self.num_kept)
        for nth, (reach, room) in enumerate(self._rooms.items()):
            if self.prompts is not None:
                num_chunks = self.prompts.num_chunks(reach, 0 if reach in self._planned else singles)
                page_size, starts = self._layers.pools[reach.pool].shape.page_size, (narrow, num_chunks + 2)
                num_reads = self.prompts.num_seen // page_size + 2 * num_chunks
                sizes |= {f"row_starts{nth}": starts, f"seen_starts{nth}": starts}
                sizes[f"reads{nth}"] = (narrow, 4 * num_reads)
            sizes |= {
                f"counts{nth}": (narrow, 2),
                f"parts{nth}": (narrow, 7 * sum(room.grid)),
                f"readers{nth}": (narrow, room.num_outputs),
                f"readings{nth}": (narrow, room.num_outputs),
                f"starts{nth}": (narrow, singles),
                f"ends{nth}": (narrow, singles),
            }
        # These come last, so that only those that are read are copied.
        return sizes | {"pages": (narrow, sum(room.num_pages for room in self._rooms.values()))}

    def _view(self, nth: int, reach: Reach, outputs: StepOutputs) -> ReachView:
        kv, device = self._layers.pools[reach.pool], self._areas.device
        rows, pages, slots = (device[f"stored_{name}{reach.pool}"] for name in Slots._fields)
        slots_of_rows, is_planned = (rows, pages, slots), reach in self._planned
        return ReachView(
            kv=kv,
            slots=_NO_SLOTS,
            chunks=(),
            spans=(),
            decode=self._view_singles(nth, reach, outputs) if self.num_singles and is_planned else None,
            numbers=None,
            static_slots=slots_of_rows,
            static_packed=self._view_prompts(nth, reach) if self.keeps_some or not is_planned else None,
            store=on_device(self._layers, reach).store if is_planned else None,
        )

    def _view_singles(self, nth: int, reach: Reach, outputs: StepOutputs) -> PartsView:
        room, device, chosen = self._rooms[reach], self._areas.device, on_device(self._layers, reach)
        num_heads, v_head_dim = chosen.num_heads, self._layers.pools[reach.pool].shape.v_head_dim
        num_log_sums = room.num_outputs * num_heads
        return PartsView(
            pages=device["pages"],
            readers=device[f"readers{nth}"],
            parts=device[f"parts{nth}"].view(-1, 7),
            readings=device[f"readings{nth}"],
            starts=device[f"starts{nth}"],
            ends=device[f"ends{nth}"],
            offsets=self._arange[: self.num_singles].to(torch.int32),
            counts=device[f"counts{nth}"],
            grid=room.grid,
            outputs=outputs.numbers[: num_log_sums * v_head_dim].view(-1, num_heads, v_head_dim),
            log_sums=outputs.log_sums[:num_log_sums].view(-1, num_heads),
            attend=chosen.attend,
        )

    def _view_prompts(self, nth: int, reach: Reach) -> PackedView:
        room, device = self.prompts, self._areas.device
        packing = self._layers.packing_of(reach)
        assert room is not None and packing is not None, "prompts do not attend together"
        first = self.num_singles if reach in self._planned else 0
        chunks = PackedChunks(
            rows=slice(first, self.num_rows),
            row_starts=device[f"row_starts{nth}"],
            seen_starts=device[f"seen_starts{nth}"],
            reads=device[f"reads{nth}"].view(-1, 4),
            longest=max(room.num_tokens, self.num_singles - first),
            most_seen=room.num_seen,
            num_seen=room.num_seen,
            are_whole=False,
        )
        sources = device["sources"] if self._has_sources else None
        return PackedView((chunks,), packing, reach.sliding_window, sources)

    def _plan(self, reach: Reach, chunks: Sequence[Chunk]) -> PiecesPlan:
        page_size = self._layers.pools[reach.pool].shape.page_size
        pieces = pieces_of([read_of(chunk, reach, page_size) for chunk in chunks], page_size)
        return PiecesPlan(pieces.pages, pieces.readers, self._cut(reach, outline_of(pieces)), pieces)

    def _cut(self, reach: Reach, pieces: Outline) -> PieceParts:
        kv, chosen = self._layers.pools[reach.pool], on_device(self._layers, reach)
        return cut_pieces(pieces, kv, chosen.num_heads, chosen.num_programs)

    def _set_plans(self, plans: Iterable[PiecesPlan]) -> int:
        """Write the plans, and return the number of their pages."""
        num_pages = 0
        for nth, plan in enumerate(plans):
            self._set_plan(nth, plan, num_pages)
            num_pages += len(plan.pages)
        return num_pages

    def _set_plan(self, nth: int, plan: PiecesPlan, first_page: int) -> None:
        host, table, joins = self._areas.host, plan.parts.table, plan.parts.joins
        own = host[f"parts{nth}"].reshape(-1, 7)[: len(table)]
        own[:] = table
        own[:, :2] += first_page
        host[f"counts{nth}"][:] = plan.parts.num_narrow, len(table)
        host[f"readers{nth}"][: len(plan.readers)] = plan.readers
        host[f"readings{nth}"][: len(joins.readings)] = joins.readings
        self._set(f"starts{nth}", joins.starts[:-1])
        self._set(f"ends{nth}", joins.starts[1:])
        host["pages"][first_page : first_page + len(plan.pages)] = plan.pages

    def _set(self, name: str, values: Sequence[int | None] | NDArray[np.integer]) -> None:
        area: NDArray[Any] = self._areas.host[name]
        area[: len(values)] = values
        area[len(values) :] = area[0]
