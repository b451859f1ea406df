"""A tier's copies reach a pool on a GPU through pinned memory, on a stream of their own.

    down   pages --copied--> pinned memory, event awaited --> the tier's thread writes a slot
    up     slot, its digest compared --> pinned memory --copied--> pages, event awaited --> they are published

There is one buffer, of one slot, and only the tier's thread waits. Nothing orders these copies and a step's
kernels, and nothing has to: a step has ended on the device before its pages are published, pages that are
read into belong to nobody else until the event, and what is copied out of a page that gets a new owner
meanwhile is discarded (services/tier/copies.py).
"""

import errno
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.kv.tiers.slot_spans import SlotSpan
from services.values.errors import Unavailable


class CopyQueue(Protocol):
    """Copies that have begun run in any order, and are over once they were waited for.

    Both methods raise RuntimeError.
    """

    def begin(self, target: Tensor, source: Tensor) -> None: ...
    def wait(self) -> None: ...


class CudaQueue:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event(blocking=True)  # Its waiter sleeps instead of taking a core.

    def begin(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        self._event.record(self._stream)
        self._event.synchronize()


class _Run(NamedTuple):
    """It is bytes that are neighbours both in the slot and in the pool."""

    at: int
    pool: int
    start: int
    num_bytes: int


class PinnedStaging:
    def __init__(
        self, slot_bytes: int, pools: Sequence[Tensor], queue: CopyQueue, *, pinned: bool = True
    ) -> None:
        """`pools` are uint8 [num_units, unit_bytes] and contiguous, in the order of `KvLayout.unit_bytes`.

        Raises Unavailable where so much memory cannot be pinned.
        """
        try:
            self._slot = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise Unavailable(f"--kv-tier: {slot_bytes} bytes cannot be pinned: {error}") from error
        self.bytes = memoryview(self._slot.numpy())
        self._unit_bytes = [pool.shape[1] for pool in pools]
        self._pools = [pool.view(-1) for pool in pools]
        self._queue = queue

    def take(self, spans: Sequence[SlotSpan]) -> None:
        self._copy([(self._in_slot(run), self._in_pool(run)) for run in self._runs(spans)])

    def give(self, spans: Sequence[SlotSpan]) -> None:
        self._copy([(self._in_pool(run), self._in_slot(run)) for run in self._runs(spans)])

    def close(self) -> None:
        self._pools = []  # Their memory is the device's again once the runner has closed them.

    @torch.inference_mode()
    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each pair's second into its first, and wait for those that have begun even where one fails."""
        try:
            try:
                for target, source in pairs:
                    self._queue.begin(target, source)
            finally:
                self._queue.wait()
        except RuntimeError as error:
            raise OSError(errno.EIO, f"the device copies nothing: {error}") from error

    def _in_slot(self, run: _Run) -> Tensor:
        return self._slot[run.at : run.at + run.num_bytes]

    def _in_pool(self, run: _Run) -> Tensor:
        return self._pools[run.pool][run.start : run.start + run.num_bytes]

    def _runs(self, spans: Sequence[SlotSpan]) -> Iterator[_Run]:
        run = _Run(0, 0, 0, 0)
        for span in spans:
            start = span.unit * self._unit_bytes[span.pool] + span.start
            if (run.at + run.num_bytes, run.pool, run.start + run.num_bytes) == (span.at, span.pool, start):
                run = run._replace(num_bytes=run.num_bytes + span.num_bytes)
                continue
            if run.num_bytes:
                yield run
            run = _Run(span.at, span.pool, start, span.num_bytes)
        if run.num_bytes:
            yield run
