"""What attention must know of a step, worked out once for all layers: who reads which pages.

Pages that single tokens read are sorted by number. Neighbours with as many readers each are a *run*: one
strided tensor, read where it lies, pages as the batch dimension, whoever its readers are. So a prefix
that several sequences share is a run with all of them as readers, a prefix of a prefix another one, and
private pages that lie side by side are one run too. Where a kernel call costs more than it saves, a gap is
read for nothing, and what is short is copied together.
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

# In K and V of one layer: to copy this much, or to attend to it with one reader, costs about what a call of
# the kernel costs besides.
_CALL_BYTES = 128 << 10


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
    """Neighbouring pages, read where they are."""

    first_page: int
    num_pages: int
    readers: Tensor  # int64 [num_pages, readers], queries; [1, readers] where all pages have the same
    mask: Tensor | None  # 0 or -inf, [num_pages, 1, 1, page_size]; None where every slot counts


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

    Runs and copies yield, in this order, rows for each page, each of its readers and each of its heads.
    parts[i * num_heads + h] are the rows of head h of query i. Where queries have unequal numbers of rows,
    they are filled up with the row after all others, which `nothing` yields: output 0, log-sum-exp -inf.
    """

    offsets: Tensor  # int64 [num_queries]
    runs: tuple[PageRun, ...]
    copies: tuple[PageCopies, ...]
    parts: Tensor  # int64 [num_queries * num_heads, most rows of a head]
    nothing: tuple[Tensor, Tensor] | None  # [1, head_dim] and [1]


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
    page_bytes = kv[0, 0].numel() * kv.itemsize
    pages, tokens, queries = _page_reads(chunks, page_size)
    # Of a page that is less than half full, a copy of what is there is cheaper than a look at all of it.
    is_short = 2 * tokens <= page_size
    short = _Reads(pages[is_short], tokens[is_short], queries[is_short][:, None])
    reads = _runs(pages[~is_short], tokens[~is_short], queries[~is_short], page_size, page_bytes)
    is_run = [len(read.pages) * page_bytes >= _CALL_BYTES for read in reads]
    runs = [read for read, yes in zip(reads, is_run, strict=True) if yes]
    copies = _merged([short, *(read for read, yes in zip(reads, is_run, strict=True) if not yes)])
    segments = np.concatenate([read.segments.ravel() for read in (*runs, *copies)])
    parts, is_padded = _parts(segments, len(chunks), num_heads)
    nothing = torch.zeros(1, kv.shape[5], dtype=kv.dtype), torch.full((1,), -torch.inf)
    return DecodeView(
        offsets=torch.tensor([offset for offset, _ in decodes]),
        runs=tuple(_page_run(read, page_size, kv.dtype) for read in runs),
        copies=tuple(_page_copies(read, kv.dtype) for read in copies),
        parts=torch.from_numpy(parts),
        nothing=nothing if is_padded else None,
    )


@dataclass(frozen=True, slots=True)
class _Reads:
    """Pages that are read in one call."""

    pages: Ids  # [num_pages]
    num_tokens: Ids  # [num_pages], of each page, from its first slot on
    segments: Ids  # [num_pages, readers], the queries that read each; -1: nobody wants what comes out


def _page_reads(chunks: Sequence[Chunk], page_size: int) -> tuple[Ids, Ids, Ids]:
    """For each page of each query, sorted by page: page, tokens, query."""
    counts = [-(-chunk.end // page_size) for chunk in chunks]
    tables = [np.asarray(chunk.pages[:count], np.int64) for chunk, count in zip(chunks, counts, strict=True)]
    lasts = np.cumsum(counts) - 1
    tokens = np.full(lasts[-1] + 1, page_size)
    tokens[lasts] = [(chunk.end - 1) % page_size + 1 for chunk in chunks]
    pages, queries = np.concatenate(tables), np.repeat(np.arange(len(chunks)), counts)
    order = np.lexsort((tokens, pages))
    return pages[order], tokens[order], queries[order]


def _runs(pages: Ids, tokens: Ids, queries: Ids, page_size: int, page_bytes: int) -> list[_Reads]:
    """Neighbours with as many readers each.

    A small gap between two is read for nothing where that costs less than another call; the more readers,
    the smaller.
    """
    keys, first, counts = np.unique(pages * (page_size + 1) + tokens, return_index=True, return_counts=True)
    unique, unique_tokens = pages[first], tokens[first]
    gaps = np.diff(unique) - 1
    is_border = (gaps < 0) | (gaps * counts[1:] * page_bytes > _CALL_BYTES) | (np.diff(counts) != 0)
    borders = [0, *(np.flatnonzero(is_border) + 1).tolist(), len(keys)] if len(keys) else []
    runs = []
    for start, end in pairwise(borders):
        count, begin = int(counts[start]), int(first[start])
        run_pages = np.arange(unique[start], unique[end - 1] + 1)
        place = unique[start:end] - unique[start]
        run_tokens = np.full(len(run_pages), page_size)
        run_tokens[place] = unique_tokens[start:end]
        segments = np.full((len(run_pages), count), -1)
        segments[place] = queries[begin : begin + (end - start) * count].reshape(-1, count)
        runs.append(_Reads(run_pages, run_tokens, segments))
    return runs


def _merged(reads: Sequence[_Reads]) -> list[_Reads]:
    """Reads with equal numbers of readers become one; empty ones vanish."""
    by_count: dict[int, list[_Reads]] = {}
    for read in filter(lambda read: len(read.pages), reads):
        by_count.setdefault(read.segments.shape[1], []).append(read)
    return [
        _Reads(
            np.concatenate([read.pages for read in group]),
            np.concatenate([read.num_tokens for read in group]),
            np.concatenate([read.segments for read in group]),
        )
        for group in by_count.values()
    ]


def _page_run(reads: _Reads, page_size: int, dtype: torch.dtype) -> PageRun:
    wanted = reads.segments[reads.segments[:, 0] >= 0]
    readers = reads.segments.clip(0)
    if (wanted == wanted[0]).all():
        readers = wanted[:1]
    return PageRun(
        first_page=int(reads.pages[0]),
        num_pages=len(reads.pages),
        readers=torch.from_numpy(readers),
        mask=_mask(reads.num_tokens, page_size, dtype),
    )


def _page_copies(reads: _Reads, dtype: torch.dtype) -> PageCopies:
    num_tokens = int(reads.num_tokens.max())
    return PageCopies(
        pages=torch.from_numpy(reads.pages),
        num_tokens=num_tokens,
        readers=torch.from_numpy(reads.segments.clip(0)),
        mask=_mask(reads.num_tokens, num_tokens, dtype),
    )


def _mask(lengths: Ids, num_tokens: int, dtype: torch.dtype) -> Tensor | None:
    """0, and -inf past each length; [pages, 1, 1, num_tokens]. None where nothing is masked."""
    if (lengths == num_tokens).all():
        return None
    is_past = torch.from_numpy(np.arange(num_tokens) >= lengths[:, None])
    return torch.zeros(is_past.shape, dtype=dtype).masked_fill_(is_past, -torch.inf)[:, None, None]


def _parts(segments: Ids, num_queries: int, num_heads: int) -> tuple[Ids, bool]:
    """See DecodeView.parts, and whether they are filled up. `segments` are the query of each read, or -1."""
    order = np.argsort(segments, kind="stable")
    order = order[np.searchsorted(segments[order], 0) :]
    counts = np.bincount(segments[order], minlength=num_queries)
    rank_in_query = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.full((num_queries, num_heads, counts.max()), len(segments) * num_heads)
    rows[segments[order], :, rank_in_query] = order[:, None] * num_heads + np.arange(num_heads)
    return rows.reshape(num_queries * num_heads, -1), bool((counts < counts.max()).any())
