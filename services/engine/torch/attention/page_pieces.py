"""Single tokens that read the same pages at the same place read them together.

Neighbouring pages that the same queries read are a *piece*: a prefix that several sequences share, a longer
prefix that fewer of them share, and each sequence's own pages. Where windows cut a page, those that begin at
the same slot share it. A page that is still being filled may have another end for every reader, so each reads
it alone. PagePieces are in the order of their places, so that each query reads its tokens in their order.

For a device, pieces are cut into parts, one for each program, which the queries then join. A piece is pages
times their readers. A part is some of the pages times some of the readers, for one KV head at a time.

Pages are cut so that a device with many processors has a part for each of them, also with one long context.
Readers are cut only where their query heads are more rows than a program multiplies at once. So up to 64
query heads (32 in float32) of one KV head read a page together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.engine.torch.attention.cpu_attention_kernel import Ids, PagePieces
from services.engine.torch.attention.paged_kv import PagedKv, Scores
from services.engine.torch.attention.plan_kernel import go_on, last_pieces, plan_parts, plan_pieces
from services.engine.torch.device import send
from services.values.kv import PageId

# Page tables of at least this average length are cached between steps, up to so many tables.
_LONG_TABLE, _KEPT_TABLES = 48, 1024


class Read(NamedTuple):
    """One query reads slots [skip, skip + num_tokens) of its pages, counted from the first one on."""

    pages: Sequence[PageId]
    first_page: int  # This is the index of pages[0] in the sequence.
    skip: int  # This is less than a page.
    num_tokens: int  # They end in the last page.


def pieces_of(reads: Sequence[Read], page_size: int) -> PagePieces:
    if len(reads) == 1:
        return _alone(reads[0], page_size)
    tables, first_pages, skips, nums_tokens = zip(*reads, strict=True)
    counts = np.array([len(pages) for pages in tables])
    pages = _joined(tables, int(counts.sum()))
    ends = (np.array(skips) + np.array(nums_tokens) - 1) % page_size + 1
    return PagePieces(*plan_pieces(pages, counts, np.array(first_pages), np.array(skips), ends, page_size))


def _joined(tables: Sequence[Sequence[PageId]], num_pages: int) -> Ids:
    if num_pages < _LONG_TABLE * len(tables):
        return np.fromiter(chain.from_iterable(tables), np.int64, num_pages)
    return np.concatenate([_known.array_of(pages) for pages in tables])


class _KnownTables:
    """A row mostly reads the pages of its last step, so arrays of page ids are cached by their last page.

    Comparing two lists of the same numbers takes a twentieth of the time of converting one to an array.
    """

    def __init__(self) -> None:
        self._by_last_page: dict[PageId, tuple[list[PageId], Ids]] = {}

    def array_of(self, pages: Sequence[PageId]) -> Ids:
        known = self._by_last_page.get(pages[-1])
        if known is not None and known[0] == pages:
            return known[1]
        array = np.fromiter(pages, np.int64, len(pages))
        if len(self._by_last_page) >= _KEPT_TABLES:
            self._by_last_page.clear()
        self._by_last_page[pages[-1]] = list(pages), array
        return array


_known = _KnownTables()


def _alone(read: Read, page_size: int) -> PagePieces:
    """Build the pieces without a search, since for one query alone every microsecond counts."""
    pages = np.array(read.pages, np.int64)
    firsts, ends = np.zeros(len(pages), np.int64), np.full(len(pages), page_size, np.int64)
    firsts[0], ends[-1] = read.skip, (read.skip + read.num_tokens - 1) % page_size + 1
    starts = np.array([0, len(pages), 0, 1])
    return PagePieces(pages, firsts, ends, starts[:2], starts[:1], starts[2:])


# A program multiplies so many rows at once: a row is one query head of one reader. Tensor cores take at least
# 16. Parts of that size have a launch of their own, since one sequence alone reads most pages. Wide parts are
# as wide as registers and shared memory allow.
_NARROW_ROWS, _WIDE_ROW_BYTES = 16, 128
# A part of fewer tokens is not worth the time to join it.
_LEAST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Tuning:
    """These settings keep a device busy; they change results only by rounding."""

    programs: int = 2  # This is per processor.
    num_warps: int = 4  # This is per program.
    num_stages: int = 3  # Narrow parts have one tile of K and V less than this in flight or in use at a time.
    wide_stages: int = 2
    max_slots: int = 64  # This is per tile.
    tile_bytes: int = 16 << 10  # This limits K, and V, of a tile.


# With these a program fits into 99 KiB of shared memory, except in float32 with head_dim 256, which needs 1
# KiB more: on a GPU without it, that gathers.
TUNING = Tuning()


@dataclass(frozen=True, slots=True)
class OnDevice:
    attend: "AttendParts"
    num_heads: int
    num_programs: int
    store: "StoreKv | None" = None  # Otherwise torch stores K and V.


@dataclass(frozen=True, slots=True)
class PartsView:
    """The view has the tables of the step's single tokens, on the device, in int32.

    Query i is row offsets[i] of the step. Part j is parts[j] = (first_page, end_page, first_reader,
    end_reader, first_output, first_slot, end_slot). It reads pages[k] for each k from first_page to end_page:
    the first one from first_slot on, the last one up to end_slot. Its queries are the rows readers[k] of the
    step, for each k from first_reader to end_reader. Their results are `outputs` from first_output on, in
    that order. Query i joins outputs[readings[k]] for each k from starts[i] to ends[i]. Queries may share
    readings.

    Tables may have room for more than a step needs: `counts` has the real numbers of parts. `grid` has the
    numbers of programs that are launched, and those beyond the counts do nothing.
    """

    pages: Tensor
    readers: Tensor
    parts: Tensor  # The shape is [at least num_parts, 7], with the narrow ones first.
    readings: Tensor
    starts: Tensor  # The length is num_queries.
    ends: Tensor  # The length is num_queries.
    offsets: Tensor  # The length is num_queries.
    counts: Tensor  # These are the number of narrow parts and of all parts.
    grid: tuple[int, int]  # These are the programs for narrow and for wide parts; with 0 none is launched.
    outputs: Tensor  # Each layer writes these anew, float32 [at least num_outputs, num_heads, v_head_dim].
    log_sums: Tensor  # These have base 2, float32 [at least num_outputs, num_heads].
    attend: "AttendParts"


# The arguments are those of gpu_attention_kernel.attend_parts: view, query, the pool, layer, scores, output.
AttendParts = Callable[[PartsView, Tensor, PagedKv, int, Scores, Tensor], None]
# The arguments are those of gpu_attention_kernel.store_kv: keys, values, the pool, layer, rows, pages, slots.
StoreKv = Callable[[Tensor, Tensor, PagedKv, int, Tensor, Tensor, Tensor], None]


class Joins(NamedTuple):
    """Query i has the outputs readings[j] for each j from starts[i] to starts[i + 1]."""

    readings: Ids
    starts: Ids  # The length is num_queries + 1.


@dataclass(frozen=True, slots=True)
class PieceParts:
    table: Ids  # The shape is [num_parts, 7], as in PartsView.parts.
    num_narrow: int
    joins: Joins


def rows_of(kv: PagedKv, num_heads: int) -> tuple[int, int]:
    """Return the rows of a narrow and of a wide part: powers of two, and enough for one reader."""
    whole = 1 << (num_heads // kv.shape.num_kv_heads - 1).bit_length()
    return max(_NARROW_ROWS, whole), max(_WIDE_ROW_BYTES // kv.compute_dtype.itemsize, whole)


def view_parts(kv: PagedKv, offsets: Ids, pieces: PagePieces, on_device: OnDevice) -> PartsView:
    """Plan the parts, and send all tables in one copy; `offsets` are the queries' rows in the step."""
    parts = cut_pieces(outline_of(pieces), kv, on_device.num_heads, on_device.num_programs)
    num_parts = len(parts.table)
    tables = (
        pieces.pages,
        offsets[pieces.readers],
        parts.table.reshape(-1),
        parts.joins.readings,
        parts.joins.starts[:-1],
        parts.joins.starts[1:],
        offsets,
        np.array([parts.num_narrow, num_parts]),
    )
    device = kv.numbers.device
    (packed,) = send([np.concatenate(tables).astype(np.int32)], device)
    pages, readers, table, readings, starts, ends, on_offsets, counts = packed.split([len(t) for t in tables])
    shape = (len(parts.joins.readings), on_device.num_heads, kv.shape.v_head_dim)
    return PartsView(
        pages=pages,
        readers=readers,
        parts=table.view(num_parts, -1),
        readings=readings,
        starts=starts,
        ends=ends,
        offsets=on_offsets,
        counts=counts,
        grid=(parts.num_narrow, num_parts - parts.num_narrow),
        outputs=torch.empty(shape, dtype=torch.float32, device=device),
        log_sums=torch.empty(shape[:2], dtype=torch.float32, device=device),
        attend=on_device.attend,
    )


_NO_IDS = np.empty(0, np.int64)


class Outline(NamedTuple):
    """This is what the cuts of pieces depend on, for PagePieces with these fields."""

    first_slots: Ids  # Only the first page of a piece may begin late.
    end_slots: Ids  # Only the last page of a piece may end early.
    page_starts: Ids
    readers: Ids
    reader_starts: Ids


def outline_of(pieces: PagePieces) -> Outline:
    """Return the outline.

    A piece's readers also read the pages before and after. So slots are left out at its ends only.
    """
    starts = pieces.page_starts
    first_slots, end_slots = pieces.firsts[starts[:-1]], pieces.ends[starts[1:] - 1]
    return Outline(first_slots, end_slots, starts, pieces.readers, pieces.reader_starts)


class GrowingPieces:
    """These are the pieces of single tokens that see all before them, from step to step.

    In each step the queries are the same, and each reads one slot more, in a page that no other reads.
    """

    def __init__(self, pieces: PagePieces, table: Ids, num_queries: int) -> None:
        """`table` has the parts of the pieces."""
        self.pages = pieces.pages.astype(np.int32)
        outline = outline_of(pieces)
        self.outline = outline._replace(page_starts=outline.page_starts.copy())
        self._lasts = last_pieces(pieces.readers, pieces.reader_starts, num_queries)
        self._table, self._last_parts = table, _NO_IDS

    @property
    def can_grow(self) -> bool:
        """Return whether no query's last page is read by another one."""
        return len(self._lasts) > 0

    def grow(self, new_pages: Ids) -> None:
        """Go on to the next step: query i reads the first slot of new_pages[i], if that is not -1.

        The pieces are then to be cut again.
        """
        starts, end_slots = self.outline.page_starts, self.outline.end_slots
        self.pages = go_on(self.pages, starts, end_slots, self._lasts, new_pages)

    def are_cut(self, table: Ids) -> None:
        self._table, self._last_parts = table, _NO_IDS

    def grow_in_place(self) -> Ids:
        """Go on to the next step without a new page, and return the parts whose ends are one slot later."""
        self.outline.end_slots[self._lasts] += 1
        if not len(self._last_parts):
            is_end = np.zeros(len(self.pages) + 1, np.bool)
            is_end[self.outline.page_starts[self._lasts + 1]] = True
            self._last_parts = np.flatnonzero(is_end[self._table[:, 1]])
        return self._last_parts


def cut_pieces(pieces: Outline, kv: PagedKv, num_heads: int, num_programs: int) -> PieceParts:
    """Cut about `num_programs` parts for all KV heads, or fewer where they would be too small."""
    num_kv_heads, page_size = kv.shape.num_kv_heads, kv.shape.page_size
    group = num_heads // num_kv_heads
    narrow, wide = rows_of(kv, num_heads)
    least_pages = -(-_LEAST_TOKENS // page_size)
    sizes = (narrow, wide // group, group, num_kv_heads, num_programs, least_pages, page_size)
    table, num_narrow, readings, starts = plan_parts(tuple(pieces), sizes)
    return PieceParts(table, num_narrow, Joins(readings, starts))
