"""What attention must know of a step, worked out once for all layers: who reads which pages.

Pages that single tokens read are sorted by number. Neighbours with as many readers each are a *run*: one
strided tensor, read where it lies, pages as the batch dimension, whoever its readers are. So a prefix
that several sequences share is a run with all of them as readers, a prefix of a prefix another one, and
private pages that lie side by side are one run too. Runs too short to be worth a kernel call, and the
pages that are still filling, are copied together instead, each page once whoever reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.runner import Chunk

Ids = NDArray[np.int64]

# K and V of one layer: copying this much costs about what a call of the kernel costs.
_MIN_RUN_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Tokens [offset, offset + length) of the step: the last ones of a sequence of `end` tokens."""

    offset: int
    length: int
    end: int
    pages: Tensor  # int64, the pages of positions [0, end)
    mask: Tensor | None  # bool [length, end]; None where is_causal or nothing is masked

    @property
    def is_causal(self) -> bool:
        return self.length == self.end


@dataclass(frozen=True, slots=True)
class PageRun:
    """Neighbouring full pages, read where they are."""

    first_page: int
    num_pages: int
    readers: (
        Tensor  # int64 [num_pages, readers], rows of the queries; [1, readers] where all are read by the same
    )


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Pages from anywhere, of which the first `num_tokens` slots are copied before they are read."""

    pages: Tensor  # int64 [num_pages]
    num_tokens: int
    readers: Tensor  # int64 [num_pages, readers]
    mask: Tensor | None  # 0 or -inf, [num_pages, 1, 1, num_tokens]; None where every slot counts


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The step's single tokens: query i is the one at offsets[i] of the step.

    Runs and copies yield, in this order, a part of the attention for each page and each of its readers.
    parts[i, h] are those of head h of query i, counted in heads; they are filled up with one past the last.
    """

    offsets: Tensor  # int64 [num_queries]
    runs: tuple[PageRun, ...]
    copies: tuple[PageCopies, ...]
    parts: Tensor  # int64 [num_queries, num_heads, most parts of a query]


@dataclass(frozen=True, slots=True)
class StepView:
    """The same for all layers."""

    kv: Tensor  # the pool: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    token_pages: Tensor  # int64 [total]
    token_slots: Tensor  # int64 [total]
    chunks: tuple[ChunkView, ...]
    decode: DecodeView | None


def view_step(kv: Tensor, chunks: Sequence[Chunk], *, num_heads: int, in_place: bool) -> StepView:
    """Plan a step over the pool `kv`. With `in_place`, single tokens read pages where they are (CPU only)."""
    page_size = kv.shape[4]
    offsets = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])[:-1].tolist()
    placed = list(zip(offsets, chunks, strict=True))
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    pages = [_pages_at(c, p, page_size) for c, p in zip(chunks, positions, strict=True)]
    decodes = [(offset, c) for offset, c in placed if in_place and len(c.token_ids) == 1]
    gathered = [(offset, c) for offset, c in placed if not (in_place and len(c.token_ids) == 1)]
    return StepView(
        kv=kv,
        token_pages=torch.from_numpy(np.concatenate(pages)).to(kv.device),
        token_slots=torch.from_numpy(np.concatenate(positions) % page_size).to(kv.device),
        chunks=tuple(_view_chunk(offset, chunk, page_size, kv.device) for offset, chunk in gathered),
        decode=_view_decodes(decodes, kv, num_heads) if decodes else None,
    )


def _pages_at(chunk: Chunk, positions: Ids, page_size: int) -> Ids:
    first = chunk.start // page_size
    return np.asarray(chunk.pages[first:], np.int64)[positions // page_size - first]


def _view_chunk(offset: int, chunk: Chunk, page_size: int, device: torch.device) -> ChunkView:
    length, end = len(chunk.token_ids), chunk.end
    mask = None
    if chunk.start > 0 and length > 1:
        mask = torch.ones(length, end, dtype=torch.bool, device=device).tril(chunk.start)
    pages = torch.tensor(chunk.pages[: -(-end // page_size)], dtype=torch.int64, device=device)
    return ChunkView(offset, length, end, pages, mask)


def _view_decodes(decodes: Sequence[tuple[int, Chunk]], kv: Tensor, num_heads: int) -> DecodeView:
    page_size = kv.shape[4]
    chunks = [chunk for _, chunk in decodes]
    runs, lone = _split(_shared_pages(chunks, page_size), _min_run_pages(kv))
    copies = _copies([*lone, *_tails(chunks, page_size)], page_size, kv.dtype)
    yielded = [run.readers.expand(run.num_pages, -1) for run in runs] + [copy.readers for copy in copies]
    segments = torch.cat([readers.flatten() for readers in yielded]).numpy()
    return DecodeView(
        offsets=torch.tensor([offset for offset, _ in decodes]),
        runs=runs,
        copies=copies,
        parts=_parts(segments, len(chunks), num_heads),
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """`pages` [num_pages], each read by as many queries: `readers` [num_pages, readers]."""

    pages: Ids
    readers: Ids
    num_tokens: int  # of each page


def _shared_pages(chunks: Sequence[Chunk], page_size: int) -> list[_Read]:
    """The full pages, ascending, in runs of neighbours with equal numbers of readers."""
    num_full = [chunk.end // page_size for chunk in chunks]
    tables = [np.asarray(chunk.pages[:n], np.int64) for chunk, n in zip(chunks, num_full, strict=True)]
    pages, rows = np.concatenate(tables), np.repeat(np.arange(len(chunks)), num_full)
    order = np.argsort(pages, kind="stable")
    rows = rows[order]
    unique, first, counts = np.unique(pages[order], return_index=True, return_counts=True)
    is_new_run = (np.diff(unique) != 1) | (np.diff(counts) != 0)
    borders = [0, *(np.flatnonzero(is_new_run) + 1).tolist(), len(unique)] if len(unique) else []
    reads = []
    for start, end in pairwise(borders):
        count, begin = int(counts[start]), int(first[start])
        readers = rows[begin : begin + (end - start) * count].reshape(-1, count)
        reads.append(_Read(unique[start:end], readers, page_size))
    return reads


def _tails(chunks: Sequence[Chunk], page_size: int) -> list[_Read]:
    """The pages that are still filling; nobody shares such a one."""
    return [
        _Read(np.array([chunk.pages[chunk.end // page_size]]), np.array([[row]]), chunk.end % page_size)
        for row, chunk in enumerate(chunks)
        if chunk.end % page_size
    ]


def _min_run_pages(kv: Tensor) -> int:
    page_bytes_of_layer: int = kv[0, 0].numel() * kv.itemsize
    return -(-_MIN_RUN_BYTES // page_bytes_of_layer)


def _split(reads: Sequence[_Read], min_pages: int) -> tuple[tuple[PageRun, ...], list[_Read]]:
    """Runs that are long enough, and the reads that are too short to be one."""
    runs = tuple(_run(read) for read in reads if len(read.pages) >= min_pages)
    return runs, [read for read in reads if len(read.pages) < min_pages]


def _run(read: _Read) -> PageRun:
    readers = read.readers
    if (readers == readers[0]).all():
        readers = readers[:1]
    return PageRun(int(read.pages[0]), len(read.pages), torch.from_numpy(readers))


def _copies(reads: Sequence[_Read], page_size: int, dtype: torch.dtype) -> tuple[PageCopies, ...]:
    """Reads with equal numbers of readers become one copy."""
    by_count: dict[int, list[_Read]] = {}
    for read in reads:
        by_count.setdefault(read.readers.shape[1], []).append(read)
    return tuple(_copy(group, dtype) for group in by_count.values())


def _copy(reads: Sequence[_Read], dtype: torch.dtype) -> PageCopies:
    lengths = np.repeat([read.num_tokens for read in reads], [len(read.pages) for read in reads])
    num_tokens = int(lengths.max())
    mask = None
    if (lengths < num_tokens).any():
        is_past = torch.from_numpy(np.arange(num_tokens) >= lengths[:, None])
        mask = torch.zeros(is_past.shape, dtype=dtype).masked_fill_(is_past, -torch.inf)[:, None, None]
    return PageCopies(
        pages=torch.from_numpy(np.concatenate([read.pages for read in reads])),
        num_tokens=num_tokens,
        readers=torch.from_numpy(np.concatenate([read.readers for read in reads])),
        mask=mask,
    )


def _parts(segments: Ids, num_queries: int, num_heads: int) -> Tensor:
    """See DecodeView.parts; `segments` are the query of each part."""
    counts = np.bincount(segments, minlength=num_queries)
    order = np.argsort(segments, kind="stable")
    rank_in_query = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = np.full((num_queries, counts.max()), len(segments))
    parts[segments[order], rank_in_query] = order
    return torch.from_numpy(parts[:, None] * num_heads + np.arange(num_heads)[:, None])
