"""Attention needs these facts about a step, which are computed once for all layers of a reach.

A table from the start has each layer's place, and how far back it sees. Pool 0 belongs to full attention and
pool i to a windowed group, with the pages of tails[i - 1]. A reach is a pair: a pool, and how far back a
token sees in it. All layers of one reach share one plan of the step. A layer's place is its reach, and its
number among the layers of that pool.

A model all of whose layers have a window stores them in pool 0, whole: there a window only masks.
"""

from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.cpu_attention_kernel import PagePieces, Slots, Span
from services.engine.torch.attention.page_pieces import (
    OnDevice,
    PartsView,
    Read,
    StoreKv,
    pieces_of,
    view_parts,
)
from services.engine.torch.attention.paged_kv import PagedKv
from services.engine.torch.attention.prompts import PackedView, Packing, PlacedRead, pack_chunks
from services.engine.torch.device import send
from services.engine.torch.vector_lanes import HAS_FLOAT16
from services.values.errors import ProtocolError
from services.values.kv import GroupKind, PageId

Position = TypeVar("Position", int, Tensor, NDArray[np.int64])


class StoredLayers(Protocol):
    def take(self) -> tuple[int, bool]:
        """Return the layer whose K and V the running attention reads, and whether it stores its own there.

        After the model's `cache.update(key, value, layer_idx)` it returns (layer_idx, True), once. Otherwise
        it returns (the layer whose K and V are shared, False).
        """


@dataclass(frozen=True, slots=True)
class InPlace:
    num_threads: int = 1
    executor: Executor | None = None  # The executor has num_threads - 1 threads.


@dataclass(frozen=True, slots=True)
class Reach:
    """A token at p sees the positions [first_seen(p), p] of its sequence, in the pages of a pool."""

    pool: int
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window: int = 0  # This is in tokens, the token itself included; 0 means all.

    def first_seen(self, position: Position) -> Position:
        """Return the first position that a token sees.

        It is negative where the window extends before the sequence's start.
        """
        if self.kind is GroupKind.SLIDING_WINDOW:
            return position - self.window + 1
        if self.kind is GroupKind.CHUNKED_WINDOW:
            return position // self.window * self.window
        return position - position

    @property
    def sliding_window(self) -> int:
        return self.window if self.kind is GroupKind.SLIDING_WINDOW else 0


@dataclass(frozen=True, slots=True)
class LayerPlace:
    reach: Reach
    index: int  # This is the index among the layers of the reach's pool.


@dataclass(frozen=True)
class PagedLayers:
    """`in_place` has for each pool of a runner how tokens attend; with None they gather.

    `packings` have how chunks that gather do so together; with None they do so one by one.
    """

    pools: Sequence[PagedKv]
    in_place: Sequence[InPlace | OnDevice | None]
    places: Mapping[int, LayerPlace]  # The keys are the layer_idx that the model passes to cache.update.
    packings: Sequence[Packing | None] = ()

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        return tuple(dict.fromkeys(place.reach for place in self.places.values()))

    def packing_of(self, reach: Reach) -> Packing | None:
        return self.packings[reach.pool] if self.packings else None


# Another thread is worth waking only for so many bytes, since torch's own threads still spin on their cores.
_SHARE_BYTES = 4 << 20
# Reading a page takes as long as multiplying it for so many readers.
_READERS_OF_A_READ = 8


# Kernels for the CPU read these types, as arrays of the types beside them.
_NUMPY_VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
if HAS_FLOAT16:
    _NUMPY_VIEWS[torch.float16] = torch.int16
IN_PLACE_DTYPES = tuple(_NUMPY_VIEWS)


def as_numpy(numbers: Tensor) -> NDArray[Any]:
    """Return a view of the same memory for the CPU's kernels; the type is one of IN_PLACE_DTYPES."""
    seen_as = _NUMPY_VIEWS[numbers.dtype]
    array: NDArray[Any] = (numbers if seen_as is numbers.dtype else numbers.view(seen_as)).numpy()
    return array


@dataclass(frozen=True)
class ChunkView:
    """A chunk's tokens are [offset, offset + length) of the step, the last ones of a sequence.

    They see positions [first, end), which begin `skip` slots into the first of `pages`. With `in_windows` the
    later tokens do not see all of the beginning.
    """

    offset: int
    length: int
    end: int
    read: Read
    in_windows: bool
    reach: Reach
    device: torch.device

    @property
    def num_seen(self) -> int:
        return self.read.num_tokens

    @property
    def first(self) -> int:
        return self.end - self.num_seen

    @property
    def skip(self) -> int:
        return self.read.skip

    @cached_property
    def pages(self) -> Tensor:
        """Return int64 page ids; like `mask` they are only built where the chunk attends by itself."""
        return torch.tensor(self.read.pages, dtype=torch.int64, device=self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """Return which of the positions that are read each token sees: [length, end - first].

        The result is None where each sees all, where each sees all up to itself (is_causal), and with windows
        on a GPU, where masks are not used (paged_attention.py).
        """
        start = self.end - self.length
        if self.in_windows:
            if self.device.type == "cuda":
                return None
            positions = torch.arange(start, self.end, device=self.device)
            return seen_by(positions, self.reach, self.first, self.end)
        if 1 < self.length < self.num_seen:
            return _causal_mask(self.length, self.num_seen, self.device)
        return None

    def placed(self, page_size: int) -> list[PlacedRead]:
        return place_reads(
            self.offset, range(self.end - self.length, self.end), self.read, self.reach, page_size
        )

    @property
    def is_causal(self) -> bool:
        """Return whether each token sees all up to itself, so that no `mask` is needed."""
        return self.length == self.num_seen and self.mask is None


@dataclass(frozen=True, slots=True)
class InPlaceView:
    """These tokens of the step read pages in place, on the CPU: query i is the i-th of `rows`."""

    rows: NDArray[np.int64] | slice
    reads: PagePieces | Span
    shares: tuple[range, ...]  # These are the shares of attend_pages.
    executor: Executor | None


@dataclass(frozen=True)
class ReachView:
    kv: PagedKv
    slots: Slots  # These are the slots of the step's tokens that are stored.
    chunks: tuple[ChunkView, ...]  # These chunks gather.
    spans: tuple[InPlaceView, ...]  # These chunks of several tokens attend in place.
    decode: InPlaceView | PartsView | None  # These single tokens attend in place.
    numbers: NDArray[Any] | None  # This is the pool as an array for the CPU's kernels, if they read it.
    # These are slots and chunks that are on the device already.
    static_slots: tuple[Tensor, Tensor, Tensor] | None = None
    static_packed: PackedView | None = None
    packing: Packing | None = None  # This packs the chunks, if they may attend together.
    store: StoreKv | None = None  # This is a kernel of the device, if there is one.

    @cached_property
    def packed(self) -> PackedView | None:
        if self.static_packed is not None:
            return self.static_packed
        if self.packing is None or not self.chunks:
            return None
        reach, page_size = self.chunks[0].reach, self.kv.shape.page_size
        placed = [each for chunk in self.chunks for each in chunk.placed(page_size)]
        return pack_chunks(placed, self.kv, self.packing, reach.sliding_window)

    @cached_property
    def in_place(self) -> tuple[InPlaceView, ...]:
        return (*self.spans, self.decode) if isinstance(self.decode, InPlaceView) else self.spans

    @cached_property
    def slot_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.static_slots is not None:
            return self.static_slots
        rows, pages, slots = send(self.slots, self.kv.numbers.device)
        return rows, pages, slots


@dataclass(frozen=True, slots=True)
class StepView:
    layers: PagedLayers
    cache: StoredLayers
    by_reach: dict[Reach, ReachView]

    def of_layer(self, layer_idx: int) -> tuple[ReachView, int]:
        place = self.layers.places[layer_idx]
        return self.by_reach[place.reach], place.index


def view_step(layers: PagedLayers, chunks: Sequence[Chunk], cache: StoredLayers) -> StepView:
    """Plan a step.

    Raises ProtocolError where a chunk lacks pages that it reads or writes.
    """
    views = {reach: _view_reach(reach, layers, chunks) for reach in layers.reaches}
    return StepView(layers, cache, views)


def _view_reach(reach: Reach, layers: PagedLayers, chunks: Sequence[Chunk]) -> ReachView:
    kv, in_place = layers.pools[reach.pool], layers.in_place[reach.pool]
    placed = list(zip(_offsets(chunks), chunks, strict=True))
    singles = [(offset, c) for offset, c in placed if len(c.token_ids) == 1]
    others = [(offset, c) for offset, c in placed if len(c.token_ids) > 1]
    spans: tuple[InPlaceView, ...] = ()
    if in_place is None:
        singles, others = [], placed
    elif isinstance(in_place, InPlace):
        spans = tuple(_view_span(offset, chunk, reach, kv, in_place) for offset, chunk in others)
        others = []
    return ReachView(
        kv=kv,
        slots=stored_slots(reach.pool, chunks, kv),
        chunks=tuple(_view_chunk(offset, chunk, reach, kv) for offset, chunk in others),
        spans=spans,
        decode=_view_decodes(singles, reach, kv, in_place) if in_place is not None and singles else None,
        numbers=as_numpy(kv.numbers) if isinstance(in_place, InPlace) else None,
        packing=layers.packing_of(reach),
        store=in_place.store if isinstance(in_place, OnDevice) else None,
    )


def stored_slots(pool: int, chunks: Sequence[Chunk], kv: PagedKv) -> Slots:
    # Appending one number to these is as fast as to a list, and many are appended as bytes.
    rows, pages, slots = array("q"), array("q"), array("q")
    page_size = kv.shape.page_size
    for chunk, offset in zip(chunks, _offsets(chunks), strict=True):
        first = chunk.start if pool else max(chunk.start, chunk.store_from)
        num_stored = chunk.end - first
        if num_stored <= 0:
            continue
        first_page, last_page = first // page_size, (chunk.end - 1) // page_size
        own = _pages(chunk, pool, first_page, last_page)
        if num_stored == 1:  # A step has many of these, so every microsecond counts.
            rows.append(offset + first - chunk.start)
            pages.append(own[0])
            slots.append(first % page_size)
            continue
        where = np.arange(first, chunk.end)
        rows.frombytes((where + (offset - chunk.start)).tobytes())
        pages.frombytes(np.asarray(own, np.int64)[where // page_size - first_page].tobytes())
        slots.frombytes((where % page_size).tobytes())
    return Slots(np.array(rows), np.array(pages), np.array(slots))


def _offsets(chunks: Sequence[Chunk]) -> list[int]:
    return [0, *accumulate(len(chunk.token_ids) for chunk in chunks[:-1])]


def _pages(chunk: Chunk, pool: int, first_page: int, last_page: int) -> Sequence[PageId]:
    held_from, held = 0, chunk.pages
    if pool:
        tail = chunk.tails[pool - 1]
        held_from, held = tail.first_page, tail.pages
    if not held_from <= first_page <= last_page < held_from + len(held):
        raise ProtocolError(
            f"a chunk needs pages {first_page} to {last_page} of its sequence, and has {len(held)} "
            f"from page {held_from} on"
        )
    return held[first_page - held_from : last_page + 1 - held_from]


def page_of(chunk: Chunk, page_size: int) -> PageId:
    """Return the page of full attention that stores the only token of a chunk."""
    place = chunk.start // page_size
    return _pages(chunk, 0, place, place)[0]


def read_of(chunk: Chunk, reach: Reach, page_size: int) -> Read:
    end, pages = chunk.start + len(chunk.token_ids), chunk.pages
    if not reach.window and not reach.pool and len(pages) == -(-end // page_size):
        return Read(pages, 0, 0, end)
    first = max(0, reach.first_seen(chunk.start))
    first_page = first // page_size
    pages = _pages(chunk, reach.pool, first_page, (end - 1) // page_size)
    return Read(pages, first_page, first - first_page * page_size, end - first)


def place_reads(offset: int, positions: range, read: Read, reach: Reach, page_size: int) -> list[PlacedRead]:
    """Return what attends together of a chunk whose rows begin at `offset`, and which has this `read`.

    Where windows are chunks of the sequence, the tokens of each are a chunk of their own: they see all from
    their window's start up to themselves.
    """
    if reach.kind is not GroupKind.CHUNKED_WINDOW:
        return [PlacedRead(offset, len(positions), read)]
    starts = [
        positions.start,
        *range(reach.first_seen(positions.start) + reach.window, positions.stop, reach.window),
    ]
    placed = []
    for start, end in pairwise([*starts, positions.stop]):
        first = reach.first_seen(start)
        first_page, end_page = first // page_size, -(-end // page_size)
        pages = read.pages[first_page - read.first_page : end_page - read.first_page]
        own = Read(pages, first_page, first % page_size, end - first)
        placed.append(PlacedRead(offset + start - positions.start, end - start, own))
    return placed


def _view_chunk(offset: int, chunk: Chunk, reach: Reach, kv: PagedKv) -> ChunkView:
    read = read_of(chunk, reach, kv.shape.page_size)
    return ChunkView(
        offset=offset,
        length=len(chunk.token_ids),
        end=chunk.end,
        read=read,
        in_windows=reach.first_seen(chunk.end - 1) > chunk.end - read.num_tokens,
        reach=reach,
        device=kv.numbers.device,
    )


def seen_by(positions: Tensor, reach: Reach, first: int, end: int) -> Tensor:
    """Return bool [len(positions), end - first]: which of [first, end) the tokens at `positions` see."""
    others = torch.arange(first, end, device=positions.device)
    return (others <= positions[:, None]) & (others >= reach.first_seen(positions)[:, None])


def _causal_mask(length: int, num_seen: int, device: torch.device) -> Tensor:
    """Return the mask of the last `length` of `num_seen` tokens: each sees all up to itself."""
    if device.type == "cuda":
        # This only describes the mask, so that flash attention, which takes no mask tensor, serves these
        # chunks, too. The kernel for a mask tensor is slower, and wrong at times (paged_attention.py).
        bias: Tensor = causal_lower_right(length, num_seen)
        return bias
    return torch.ones(length, num_seen, dtype=torch.bool, device=device).tril(num_seen - length)


def _view_decodes(
    decodes: Sequence[tuple[int, Chunk]], reach: Reach, kv: PagedKv, in_place: InPlace | OnDevice
) -> InPlaceView | PartsView:
    page_size = kv.shape.page_size
    pieces = pieces_of([read_of(chunk, reach, page_size) for _, chunk in decodes], page_size)
    offsets = np.array([offset for offset, _ in decodes], np.int64)
    if isinstance(in_place, OnDevice):
        return view_parts(kv, offsets, pieces, in_place)
    return InPlaceView(
        rows=offsets,
        reads=pieces,
        shares=_piece_shares(pieces, kv, in_place.num_threads),
        executor=in_place.executor,
    )


def _piece_shares(pieces: PagePieces, kv: PagedKv, num_threads: int) -> tuple[range, ...]:
    # A page is read once for all readers, and multiplied for each.
    num_pages, num_readers = np.diff(pieces.page_starts), np.diff(pieces.reader_starts)
    of_reader = np.repeat(num_pages * (_READERS_OF_A_READ / num_readers + 1), num_readers)
    work = np.bincount(pieces.readers, of_reader)
    return _shares(work, len(pieces.pages) * kv.shape.page_size, kv, num_threads)


def _view_span(offset: int, chunk: Chunk, reach: Reach, kv: PagedKv, in_place: InPlace) -> InPlaceView:
    read = read_of(chunk, reach, kv.shape.page_size)
    positions = np.arange(chunk.start, chunk.end)
    before = read.first_page * kv.shape.page_size
    firsts = np.maximum(reach.first_seen(positions), 0) - before
    ends = positions + 1 - before
    span = Span(np.asarray(read.pages, np.int64), firsts, ends)
    work = ends - firsts
    num_slots = int(work.sum()) // _READERS_OF_A_READ
    return InPlaceView(
        rows=slice(offset, offset + len(chunk.token_ids)),
        reads=span,
        shares=_shares(work, num_slots, kv, in_place.num_threads),
        executor=in_place.executor,
    )


def _shares(work: NDArray[Any], num_slots: int, kv: PagedKv, num_threads: int) -> tuple[range, ...]:
    """Cut the items of attend_pages into shares of about equal work.

    `work` has the work of each query. All of it takes as long as reading `num_slots`.
    """
    num_items = kv.shape.num_kv_heads * len(work)
    layer_bytes = num_slots * kv.shape.layer_numbers // kv.shape.page_size * kv.numbers.itemsize
    count = max(1, min(num_threads, layer_bytes // _SHARE_BYTES))
    if count == 1:
        return (range(num_items),)
    done = np.cumsum(np.tile(work, kv.shape.num_kv_heads))
    cuts = np.searchsorted(done, done[-1] * np.arange(1, count) / count, side="left") + 1
    bounds = dict.fromkeys([0, *cuts.tolist(), num_items])
    return tuple(range(start, end) for start, end in pairwise(bounds))
