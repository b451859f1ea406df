"""A sum that only a norm reads next is computed by the norm's kernel.

A layer adds what it computed to what it got, norms the sum, and goes on with both. The first pass of a step
that is to be captured shows which sums a norm reads before anything else does, whatever the definition's
modules look like. In later passes these wait for their norm. Where another operation comes first, the sum is
computed before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.torch.model.fused.products import Fused


class WaitingSum(NamedTuple):
    first: Tensor
    second: Tensor
    total: Tensor  # It is to be written.


class Residuals:
    """It follows the passes of one step, which all make the same operations."""

    def __init__(self, fused: Fused) -> None:
        self._fused = fused
        self._found: set[int] | None = None  # These sums are read by a norm; it is None in the first pass.
        self._noted: set[int] = set()
        self._num_sums = 0
        self._last: WaitingSum | None = None
        self._waits = False  # The last sum is not computed.

    @contextmanager
    def fusing(self) -> Iterator[None]:
        """Compute a pass while this is open."""
        if not (self._fused.is_on and self._fused.adds):
            yield
            return
        self._num_sums, self._fused.residuals = 0, self
        try:
            with _Sums(self):
                yield
                self.settle()
        finally:
            self._fused.residuals = self._last = None
            self._waits = False
        self._found = self._noted

    def take(self, rows: Tensor) -> WaitingSum | None:
        """Return the sum that waits, if it is `rows`. The caller, a norm, computes it."""
        last, waits = self._last, self._waits
        if last is None or last.total is not rows:
            return None
        if self._found is None:
            self._noted.add(self._num_sums)
        self._last, self._waits = None, False
        return last if waits else None

    def settle(self) -> None:
        """Compute the sum that waits, because another operation comes next."""
        last, waits = self._last, self._waits
        self._last, self._waits = None, False
        if last is not None and waits:
            torch.add(last.first, last.second, out=last.total)

    def sum(self, first: Tensor, second: Tensor) -> Tensor:
        self._num_sums += 1
        waits = self._found is not None and self._num_sums in self._found
        total = torch.empty_like(first) if waits else first + second
        self._last, self._waits = WaitingSum(first, second, total), waits
        return total


class _Sums(TorchDispatchMode):
    def __init__(self, residuals: Residuals) -> None:
        super().__init__()
        self._residuals = residuals

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._residuals.settle()
        if function is torch.ops.aten.add.Tensor and not kwargs and _are_alike(args):
            return self._residuals.sum(*args)
        return function(*args, **kwargs or {})


def _are_alike(args: tuple[Any, ...]) -> bool:
    """Return whether a kernel can add them, row by row."""
    if len(args) != 2 or not all(isinstance(each, Tensor) for each in args):
        return False
    first, second = args
    alike = first.shape == second.shape and first.dtype is second.dtype and first.device == second.device
    is_dense = first.dim() > 1 and first.is_contiguous() and second.is_contiguous()
    return alike and is_dense and first.is_floating_point()
