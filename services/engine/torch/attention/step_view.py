"""What attention must know of a step, worked out once for all layers: who reads which pages.

Single tokens read pages where they lie. Pages that the same queries read, wherever they are, are a *piece*: a
prefix that several sequences share, a longer prefix that fewer of them share, and what each has for itself.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from services.engine.paged.runner import Chunk
from services.engine.torch.attention.decode_kernel import Ids, Joins, Pieces
from services.engine.torch.attention.parts import OnDevice, PartsView, view_parts

# What one more thread must find to read, to be worth waking: torch's own still spin on their cores.
_SHARE_BYTES = 4 << 20
# To read a page takes as long as to multiply it for so many readers.
_READERS_OF_A_READ = 8


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Tokens [offset, offset + length) of the step: the last ones of a sequence of `end` tokens."""

    offset: int
    length: int
    end: int
    pages: Tensor  # int64, the pages of positions [0, end)
    mask: Tensor | None  # see _causal_mask; None where is_causal or nothing is masked

    @property
    def is_causal(self) -> bool:
        return self.length == self.end


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The step's single tokens, on the CPU: query i is the one at offsets[i] of the step."""

    offsets: Tensor  # int64 [num_queries]
    pieces: Pieces
    joins: Joins
    shares: tuple[range, ...]  # of attend_pages
    executor: Executor | None


@dataclass(frozen=True, slots=True)
class StepView:
    """The same for all layers."""

    kv: Tensor  # the pool: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    token_pages: Tensor  # int64 [total]
    token_slots: Tensor  # int64 [total]
    chunks: tuple[ChunkView, ...]
    decode: DecodeView | PartsView | None


@dataclass(frozen=True, slots=True)
class InPlace:
    """That single tokens are to read pages where they are, on the CPU, and by how many threads at most."""

    num_threads: int = 1
    executor: Executor | None = None  # of num_threads - 1


def view_step(kv: Tensor, chunks: Sequence[Chunk], in_place: InPlace | OnDevice | None) -> StepView:
    """Plan a step over the pool `kv`."""
    page_size = kv.shape[4]
    offsets = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])[:-1].tolist()
    placed = list(zip(offsets, chunks, strict=True))
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    pages = [_pages_at(c, p, page_size) for c, p in zip(chunks, positions, strict=True)]
    decodes = [(offset, c) for offset, c in placed if in_place is not None and len(c.token_ids) == 1]
    gathered = [(offset, c) for offset, c in placed if in_place is None or len(c.token_ids) > 1]
    return StepView(
        kv=kv,
        token_pages=torch.from_numpy(np.concatenate(pages)).to(kv.device),
        token_slots=torch.from_numpy(np.concatenate(positions) % page_size).to(kv.device),
        chunks=tuple(_view_chunk(offset, chunk, page_size, kv.device) for offset, chunk in gathered),
        decode=_view_decodes(decodes, kv, in_place) if in_place is not None and decodes else None,
    )


def _pages_at(chunk: Chunk, positions: Ids, page_size: int) -> Ids:
    first = chunk.start // page_size
    return np.asarray(chunk.pages[first:], np.int64)[positions // page_size - first]


def _view_chunk(offset: int, chunk: Chunk, page_size: int, device: torch.device) -> ChunkView:
    length, end = len(chunk.token_ids), chunk.end
    mask = _causal_mask(length, end, device) if chunk.start > 0 and length > 1 else None
    pages = torch.tensor(chunk.pages[: -(-end // page_size)], dtype=torch.int64, device=device)
    return ChunkView(offset, length, end, pages, mask)


def _causal_mask(length: int, end: int, device: torch.device) -> Tensor:
    """For the last `length` tokens of a sequence of `end`: each sees all up to itself."""
    if device.type == "cuda":
        # Only told, not made: so flash attention, which takes no mask, serves these chunks too. One that is
        # made becomes numbers, padded ones, and is for a slower kernel.
        bias: Tensor = causal_lower_right(length, end)
        return bias
    return torch.ones(length, end, dtype=torch.bool, device=device).tril(end - length)


def _view_decodes(
    decodes: Sequence[tuple[int, Chunk]], kv: Tensor, in_place: InPlace | OnDevice
) -> DecodeView | PartsView:
    pieces = _pieces([chunk for _, chunk in decodes], kv.shape[4])
    if isinstance(in_place, OnDevice):
        return view_parts(kv, np.array([offset for offset, _ in decodes]), pieces, in_place)
    readings = np.argsort(pieces.readers, kind="stable")
    starts = np.searchsorted(pieces.readers[readings], np.arange(len(decodes) + 1))
    return DecodeView(
        offsets=torch.tensor([offset for offset, _ in decodes]),
        pieces=pieces,
        joins=Joins(readings, starts),
        shares=_shares(pieces, kv, in_place.num_threads),
        executor=in_place.executor,
    )


def _pieces(chunks: Sequence[Chunk], page_size: int) -> Pieces:
    """Of single tokens, each a query."""
    pages, tokens, queries = _page_reads(chunks, page_size)
    if len(chunks) == 1:  # as below, without the search: where there is one alone, every microsecond counts
        return Pieces(pages, tokens, _starts([len(pages)]), queries[:1], _starts([1]))
    # Of a page that is still being filled, every reader may know another part.
    names = np.where(tokens == page_size, pages, pages.max() + 1 + np.arange(len(pages)))
    reads = np.argsort(names, kind="stable")
    _, firsts, counts = np.unique(names[reads], return_index=True, return_counts=True)
    # By first reader and number of readers: of a tree's pages those with the same ones are neighbours then.
    by_readers = np.lexsort((counts, queries[reads[firsts]]))
    firsts, counts = firsts[by_readers], counts[by_readers]
    starts = _starts(counts)
    readers = queries[reads[np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)]]
    stretches: dict[bytes, list[Ids]] = {}  # by readers
    for start, end in _with_the_same_readers(readers, starts):
        stretch = reads[firsts[start:end]]
        stretches.setdefault(readers[starts[start] : starts[start + 1]].tobytes(), []).append(stretch)
    read = np.concatenate([stretch for of_piece in stretches.values() for stretch in of_piece])
    return Pieces(
        pages[read],
        tokens[read],
        _starts([sum(map(len, of_piece)) for of_piece in stretches.values()]),
        np.frombuffer(b"".join(stretches), readers.dtype).copy(),  # else read-only, to numba another type
        _starts([len(of_piece) // readers.itemsize for of_piece in stretches]),
    )


def _page_reads(chunks: Sequence[Chunk], page_size: int) -> tuple[Ids, Ids, Ids]:
    """For each page of each query, sorted by query: page, tokens, query."""
    counts = [-(-chunk.end // page_size) for chunk in chunks]
    tables = [np.asarray(chunk.pages[:count], np.int64) for chunk, count in zip(chunks, counts, strict=True)]
    lasts = np.cumsum(counts) - 1
    tokens = np.full(lasts[-1] + 1, page_size)
    tokens[lasts] = [(chunk.end - 1) % page_size + 1 for chunk in chunks]
    return np.concatenate(tables), tokens, np.repeat(np.arange(len(chunks)), counts)


def _with_the_same_readers(readers: Ids, starts: Ids) -> list[tuple[int, int]]:
    """Stretches [start, end) of pages; those of page i are readers[starts[i] : starts[i + 1]]."""
    counts = np.diff(starts)
    of_next = np.arange(len(readers)) + np.repeat(counts, counts)
    are_equal = readers == readers[np.minimum(of_next, len(readers) - 1)]
    is_like_next = np.logical_and.reduceat(are_equal, starts[:-1])[:-1] & (np.diff(counts) == 0)
    return list(pairwise([0, *(np.flatnonzero(~is_like_next) + 1).tolist(), len(counts)]))


def _starts(lengths: ArrayLike) -> Ids:
    return np.concatenate([[0], np.cumsum(lengths)])


def _shares(pieces: Pieces, kv: Tensor, num_threads: int) -> tuple[range, ...]:
    """Items of attend_pages, cut where there is about as much work on either side."""
    num_kv_heads = kv.shape[3]
    if num_threads == 1:
        return (range((len(pieces.page_starts) - 1) * num_kv_heads),)
    num_pages, num_readers = np.diff(pieces.page_starts), np.diff(pieces.reader_starts)
    work = np.cumsum(np.repeat(num_pages * (_READERS_OF_A_READ + num_readers), num_kv_heads))
    layer_bytes = len(pieces.pages) * kv[0, 0].numel() * kv.itemsize
    count = max(1, min(num_threads, layer_bytes // _SHARE_BYTES))
    cuts = np.searchsorted(work, work[-1] * np.arange(1, count) / count, side="right")
    return tuple(range(start, end) for start, end in pairwise([0, *cuts.tolist(), len(work)]))
