"""Single tokens that read the same pages at the same place read them together.

Neighbouring pages that the same queries read are a *piece*: a prefix that several sequences share, a longer
prefix that fewer of them share, and what each has for itself. Where windows cut a page, it is shared by those
that begin at the same slot. Of a page that is still being filled every reader may know another part: it is
read alone. PagePieces come in the order of their places, so that each query reads its tokens in their order.

For a device they are cut into parts, each for one of its programs; queries join them.

    piece   pages x their readers            who reads what
    part    some of the pages x some of the readers, for one KV head at a time

Pages are cut so that a device with many processors has a part for each of them, also for one long context;
readers only where their query heads are more rows than a program multiplies at once. So up to 64 query heads
(32 in float32) of one KV head read a page together.
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
from services.engine.torch.attention.plan_kernel import plan_parts, plan_pieces
from services.engine.torch.device import send
from services.values.kv import PageId

# Where the tables of pages are as long as that on average, they are kept from step to step, so many of them.
_LONG_TABLE, _KEPT_TABLES = 48, 1024


class Read(NamedTuple):
    """One query reads slots [skip, skip + num_tokens) of its pages, counted from the first one on."""

    pages: Sequence[PageId]
    first_page: int  # the place of pages[0] in the sequence
    skip: int  # less than a page
    num_tokens: int  # they end in the last page


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
    """A row reads the pages of the step before, but for one in many: their array is kept by the last of them.

    To compare a list of the same numbers takes a twentieth of what it takes to make an array of them.
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
    """Make the pieces without a search: where there is one query alone, every microsecond counts."""
    pages = np.array(read.pages, np.int64)
    firsts, ends = np.zeros(len(pages), np.int64), np.full(len(pages), page_size, np.int64)
    firsts[0], ends[-1] = read.skip, (read.skip + read.num_tokens - 1) % page_size + 1
    starts = np.array([0, len(pages), 0, 1])
    return PagePieces(pages, firsts, ends, starts[:2], starts[:1], starts[2:])


# A program multiplies so many rows at once: a row is one query head of one reader. Tensor cores take 16 at
# least; parts of that many are computed apart, for most pages are read by one sequence alone. Wide ones are
# as wide as registers and shared memory allow.
_NARROW_ROWS, _WIDE_ROW_BYTES = 16, 128
# A part of fewer tokens is not worth what it takes to join it.
_LEAST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Tuning:
    """These say how a device is kept busy; what is computed is the same up to rounding."""

    programs: int = 2  # of a processor
    num_warps: int = 4  # of a program
    num_stages: int = 3  # of narrow parts: one tile of K and of V less is on its way or read at a time
    wide_stages: int = 2
    max_slots: int = 64  # of a tile
    tile_bytes: int = 16 << 10  # of K, and of V, at most


# With these a program fits into 99 KiB of shared memory. (By 1 KiB it does not in float32 with head_dim 256:
# where there are no more, that gathers.)
TUNING = Tuning()


@dataclass(frozen=True, slots=True)
class OnDevice:
    attend: "AttendParts"
    num_heads: int
    num_programs: int
    store: "StoreKv | None" = None  # else torch stores K and V


@dataclass(frozen=True, slots=True)
class PartsView:
    """The view has the step's single tokens, on the device; tables are int32.

    Query i is the one at offsets[i] of the step. Part j is parts[j] = (first_page, end_page, first_reader,
    end_reader, first_output, first_slot, end_slot): pages[k] for each k from first_page to end_page, of the
    first one from first_slot on, of the last one up to end_slot, for the queries at readers[k] of the step,
    for each k from first_reader to end_reader. Their results are `outputs` from first_output on, in that
    order. Query i joins outputs[readings[k]] for each k from starts[i] to ends[i]. Queries may share their
    readings.

    Tables may have room for more than a step needs: `counts` say how many parts there are. As many programs
    are launched as `grid` says, and those beyond the counts have nothing to do.
    """

    pages: Tensor
    readers: Tensor
    parts: Tensor  # [at least num_parts, 7], the narrow ones first
    readings: Tensor
    starts: Tensor  # [num_queries]
    ends: Tensor  # [num_queries]
    offsets: Tensor  # [num_queries]
    counts: Tensor  # of narrow parts, and of all
    grid: tuple[int, int]  # programs of narrow parts, and of wide ones; 0: none is launched
    outputs: Tensor  # float32 [at least num_outputs, num_heads, v_head_dim], for each layer anew
    log_sums: Tensor  # float32 [at least num_outputs, num_heads], to base 2
    attend: "AttendParts"


# The arguments are those of triton_kernel.attend_parts: view, query, the pool, layer, scores, output.
AttendParts = Callable[[PartsView, Tensor, PagedKv, int, Scores, Tensor], None]
# Those of triton_kernel.store_kv are: keys, values, the pool, layer, rows, pages, slots.
StoreKv = Callable[[Tensor, Tensor, PagedKv, int, Tensor, Tensor, Tensor], None]


class Joins(NamedTuple):
    """Query i has the outputs readings[j] for each j from starts[i] to starts[i + 1]."""

    readings: Ids
    starts: Ids  # [num_queries + 1]


@dataclass(frozen=True, slots=True)
class PieceParts:
    table: Ids  # [num_parts, 7], as PartsView.parts
    num_narrow: int
    joins: Joins


def rows_of(kv: PagedKv, num_heads: int) -> tuple[int, int]:
    """Return the rows of a narrow and of a wide part: powers of two, and enough for one reader."""
    whole = 1 << (num_heads // kv.shape.num_kv_heads - 1).bit_length()
    return max(_NARROW_ROWS, whole), max(_WIDE_ROW_BYTES // kv.compute_dtype.itemsize, whole)


def view_parts(kv: PagedKv, offsets: Ids, pieces: PagePieces, on_device: OnDevice) -> PartsView:
    """`offsets` say where in the step each query is. All tables go to the device in one copy."""
    parts = cut_pieces(pieces, kv, on_device.num_heads, on_device.num_programs)
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


def cut_pieces(pieces: PagePieces, kv: PagedKv, num_heads: int, num_programs: int) -> PieceParts:
    """Cut about `num_programs` parts for all KV heads, or fewer where they would be too small.

    Of the pages of a piece only the first may begin late, and only the last may end early, for its readers
    read the page before and the page after as well. So this holds of a part, and it has two slots to say.
    """
    num_kv_heads, page_size = kv.shape.num_kv_heads, kv.shape.page_size
    group = num_heads // num_kv_heads
    narrow, wide = rows_of(kv, num_heads)
    sizes = (narrow, wide // group, group, num_kv_heads, num_programs, -(-_LEAST_TOKENS // page_size))
    table, num_narrow, readings, starts = plan_parts(tuple(pieces), sizes)
    return PieceParts(table, num_narrow, Joins(readings, starts))
