"""The bytes of a pool's pages are read into the host's memory, for digests.

A pool in host memory is read where it lies. One on a GPU comes through a piece of pinned memory that each
reading thread has and keeps: as many pages at a time as fit, a copy for each run of neighbours, one wait for
all of them. They are copied on a stream of their own; on the one that computes they would wait for steps.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from services.kv.transfer_plan import runs_of
from services.values.kv import PageId

PageReader = Callable[[Sequence[PageId]], Iterator[memoryview]]

# A thread keeps so many bytes, or a page where that is more.
_STAGING_BYTES = 8 << 20


def page_reader(pages: Tensor) -> PageReader:
    """Return a reader of the pool `pages`, uint8 [num_pages, page_bytes] and contiguous.

    See ModelRunner.read_pages.
    """
    if pages.device.type == "cuda":
        return StagedPages(pages, torch.cuda.Stream(pages.device), pinned=True).read
    whole, page_bytes = memoryview(pages.view(-1).numpy()), pages.shape[1]
    return lambda wanted: _slices(whole, wanted, page_bytes)


class StagedPages:
    """Any thread may read, and each has one reading at a time."""

    def __init__(
        self, pages: Tensor, stream: torch.cuda.Stream, *, pinned: bool, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        self._pages = pages
        self._stream = stream
        self._pinned = pinned
        self._num_staged = max(1, staging_bytes // pages.shape[1])
        self._of_thread = threading.local()

    def read(self, pages: Sequence[PageId]) -> Iterator[memoryview]:
        staging = self._staging()
        staged, page_bytes = memoryview(staging.view(-1).numpy()), self._pages.shape[1]
        for first in range(0, len(pages), self._num_staged):
            wanted = pages[first : first + self._num_staged]
            self._fetch(wanted, staging)
            yield from _slices(staged, range(len(wanted)), page_bytes)

    def _staging(self) -> Tensor:
        if not hasattr(self._of_thread, "staging"):
            shape = (self._num_staged, self._pages.shape[1])
            self._of_thread.staging = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned)
        staging: Tensor = self._of_thread.staging
        return staging

    def _fetch(self, pages: Sequence[PageId], staging: Tensor) -> None:
        end = 0
        with torch.cuda.stream(self._stream):
            for run in runs_of(pages):
                start, end = end, end + run.num_pages
                staging[start:end].copy_(self._pages[run.first_page : run.end], non_blocking=True)
        self._stream.synchronize()


def _slices(whole: memoryview, pages: Sequence[int], page_bytes: int) -> Iterator[memoryview]:
    return (whole[page * page_bytes : (page + 1) * page_bytes] for page in pages)
