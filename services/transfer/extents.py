"""Pages as addresses. An extent is a contiguous piece of memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.kv.transfer_plan import PageMove
from services.values.errors import ProtocolError
from services.values.kv import PoolMemory

Extents = NDArray[np.uint64]


def extents_of(
    moves: Sequence[PageMove], source: PoolMemory, target: PoolMemory, page_bytes: int
) -> tuple[Extents, Extents]:
    """Where the moves read and where they write: two arrays of shape (len(moves), 2), address and bytes.

    Raises:
        ProtocolError: there are no moves, or one leaves a pool.
    """
    if not moves:
        raise ProtocolError("a write needs at least one page")
    pages = np.array([(m.source_page, m.target_page, m.num_pages) for m in moves], dtype=np.int64)
    sizes = pages[:, 2]
    return (
        _extents(pages[:, 0], sizes, source, page_bytes),
        _extents(pages[:, 1], sizes, target, page_bytes),
    )


def _extents(
    first: NDArray[np.int64], num_pages: NDArray[np.int64], memory: PoolMemory, page_bytes: int
) -> Extents:
    if num_pages.min() < 1 or first.min() < 0 or (first + num_pages).max() > memory.num_pages:
        raise ProtocolError(f"a move leaves the pool of {memory.num_pages} pages")
    extents = np.empty((len(first), 2), dtype=np.uint64)
    extents[:, 0] = first * page_bytes  # an offset fits int64; an address may not
    extents[:, 0] += np.uint64(memory.base_address)
    extents[:, 1] = num_pages * page_bytes
    return extents
