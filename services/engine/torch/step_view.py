"""What attention must know of a step, worked out once for all layers: who reads which pages.

Single tokens read pages where they lie. Most pages have one reader, or few: each query reads its own, one
after the other (decode_kernel.py). Neighbouring pages that are read by several queries each are a *run*: one
strided tensor with pages as the batch dimension, attended to by all its readers at once. So a prefix that
several sequences share is a run, a prefix of a prefix another one, and nothing of either is copied.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.runner import Chunk
from services.engine.torch.decode_kernel import Ids, PageReads

# What a run costs beside the same reads apart, in K and V of one layer that are read meanwhile: a call of
# torch's kernel, and for each page as much as this many readers of their own.
_CALL_BYTES = 512 << 10
_READERS_OF_A_RUN = 2.5
# A run yields a row for each reader and head of a page: of smaller pages these would outweigh what is read.
_MIN_PAGE_SIZE_OF_A_RUN = 16

# What one more thread must find to read, to be worth waking: torch's own still spin on their cores.
_SHARE_BYTES = 4 << 20

_Run = tuple[int, Ids]  # first page, and the queries that read each, [num_pages, readers]


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
    """Neighbouring pages, full of tokens, which are read together."""

    first_page: int
    num_pages: int
    readers: Tensor  # int64 [num_pages, readers], queries; [1, readers] where all pages have the same


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The step's single tokens: query i is the one at offsets[i] of the step.

    The runs yield, in this order, a block of rows for each page and each of its readers, one row for each
    head. Query i joins blocks[j], for each j from block_starts[i] to block_starts[i + 1].
    """

    offsets: Tensor  # int64 [num_queries]
    apart: PageReads
    runs: tuple[PageRun, ...]
    blocks: Ids
    block_starts: Ids  # [num_queries + 1]
    shares: tuple[range, ...]  # of attend_pages
    executor: Executor | None


@dataclass(frozen=True, slots=True)
class StepView:
    """The same for all layers."""

    kv: Tensor  # the pool: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    token_pages: Tensor  # int64 [total]
    token_slots: Tensor  # int64 [total]
    chunks: tuple[ChunkView, ...]
    decode: DecodeView | None


@dataclass(frozen=True, slots=True)
class InPlace:
    """That single tokens are to read pages where they are (CPU only), and by how many threads at most."""

    num_threads: int = 1
    executor: Executor | None = None  # of num_threads - 1


def view_step(kv: Tensor, chunks: Sequence[Chunk], in_place: InPlace | None) -> StepView:
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
    mask = None
    if chunk.start > 0 and length > 1:
        mask = torch.ones(length, end, dtype=torch.bool, device=device).tril(chunk.start)
    pages = torch.tensor(chunk.pages[: -(-end // page_size)], dtype=torch.int64, device=device)
    return ChunkView(offset, length, end, pages, mask)


def _view_decodes(decodes: Sequence[tuple[int, Chunk]], kv: Tensor, in_place: InPlace) -> DecodeView:
    pages, tokens, queries = _page_reads([chunk for _, chunk in decodes], kv.shape[4])
    runs, is_apart = _runs(pages, tokens, queries, kv)
    block_queries = np.concatenate([run.ravel() for _, run in runs]) if runs else np.zeros(0, np.int64)
    blocks = np.argsort(block_queries, kind="stable")
    boundaries = np.arange(len(decodes) + 1)
    apart = PageReads(
        pages[is_apart], tokens[is_apart], np.searchsorted(queries[is_apart], boundaries).astype(np.int64)
    )
    return DecodeView(
        offsets=torch.tensor([offset for offset, _ in decodes]),
        apart=apart,
        runs=tuple(_page_run(first_page, readers) for first_page, readers in runs),
        blocks=blocks,
        block_starts=np.searchsorted(block_queries[blocks], boundaries).astype(np.int64),
        shares=_shares(apart, kv, in_place.num_threads),
        executor=in_place.executor,
    )


def _shares(reads: PageReads, kv: Tensor, num_threads: int) -> tuple[range, ...]:
    """Items of attend_pages, cut where about as many tokens are read on either side."""
    num_kv_heads, page_size = kv.shape[3:5]
    tokens = np.diff(np.concatenate([[0], np.cumsum(reads.tokens)])[reads.starts])
    read = np.cumsum(np.repeat(tokens, num_kv_heads))
    token_bytes = kv[0, 0].numel() * kv.itemsize // page_size
    count = max(1, min(num_threads, int(tokens.sum()) * token_bytes // _SHARE_BYTES))
    cuts = np.searchsorted(read, read[-1] * np.arange(1, count) / count, side="right")
    return tuple(range(start, end) for start, end in pairwise([0, *cuts.tolist(), len(read)]))


def _page_reads(chunks: Sequence[Chunk], page_size: int) -> tuple[Ids, Ids, Ids]:
    """For each page of each query, sorted by query: page, tokens, query."""
    counts = [-(-chunk.end // page_size) for chunk in chunks]
    tables = [np.asarray(chunk.pages[:count], np.int64) for chunk, count in zip(chunks, counts, strict=True)]
    lasts = np.cumsum(counts) - 1
    tokens = np.full(lasts[-1] + 1, page_size)
    tokens[lasts] = [(chunk.end - 1) % page_size + 1 for chunk in chunks]
    return np.concatenate(tables), tokens, np.repeat(np.arange(len(chunks)), counts)


def _runs(pages: Ids, tokens: Ids, queries: Ids, kv: Tensor) -> tuple[list[_Run], NDArray[np.bool]]:
    """The runs, and which reads are left to be made apart."""
    page_bytes = kv[0, 0].numel() * kv.itemsize
    is_apart = np.ones(len(pages), bool)
    if queries[-1] + 1 < _READERS_OF_A_RUN or kv.shape[4] < _MIN_PAGE_SIZE_OF_A_RUN:
        return [], is_apart
    order = np.argsort(pages, kind="stable")
    unique, first, counts = np.unique(pages[order], return_index=True, return_counts=True)
    counts[np.minimum.reduceat(tokens[order], first) < kv.shape[4]] = 0  # it is still being filled
    runs = []
    for start, end in _neighbours(unique, counts):
        num_pages, readers = end - start, int(counts[start])
        if num_pages * (readers - _READERS_OF_A_RUN) * page_bytes < _CALL_BYTES:
            continue
        reads = order[first[start] : first[start] + num_pages * readers]
        is_apart[reads] = False
        runs.append((int(unique[start]), queries[reads].reshape(num_pages, readers)))
    return runs, is_apart


def _neighbours(pages: Ids, counts: Ids) -> list[tuple[int, int]]:
    """Stretches [start, end) of consecutive pages with equal counts."""
    is_border = (np.diff(pages) != 1) | (np.diff(counts) != 0)
    return list(pairwise([0, *(np.flatnonzero(is_border) + 1).tolist(), len(pages)]))


def _page_run(first_page: int, readers: Ids) -> PageRun:
    are_equal = bool((readers == readers[0]).all())
    return PageRun(first_page, len(readers), torch.from_numpy(readers[:1] if are_equal else readers))
