"""K and V of a step's tokens are stored in pages by what numba compiles, where the CPU attends in place."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.engine.torch.attention.kernels.numba_kernel import Ids
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.compiled import compiled


class Slots(NamedTuple):
    """K and V of the step's token rows[i] go into slot slots[i] of pages[i]."""

    rows: Ids
    pages: Ids
    slots: Ids


def store_tokens(
    keys: NDArray[Any],
    values: NDArray[Any],
    numbers: NDArray[Any],
    shape: PageShape,
    layer: int,
    slots: Slots,
) -> None:
    """Store `keys` and `values` [total, num_kv_heads, ..] in the pool's `numbers`, in pages of `shape`.

    All are of one type.
    """
    # They are put in the usual order, as attend_pages has its query.
    _store(np.ascontiguousarray(keys), np.ascontiguousarray(values), numbers, shape, layer, slots)


@compiled()
def _store(keys: Any, values: Any, numbers: Any, shape: Any, layer: Any, to: Any) -> None:
    num_layers, num_kv_heads, page_size, head_dim, v_head_dim = shape
    keys_size = num_kv_heads * page_size * head_dim
    of_layer = keys_size + num_kv_heads * page_size * v_head_dim
    for i in range(len(to.rows)):
        at = (to.pages[i] * num_layers + layer) * of_layer
        for head in range(num_kv_heads):
            slot = head * page_size + to.slots[i]
            for d in range(head_dim):
                numbers[at + slot * head_dim + d] = keys[to.rows[i], head, d]
            for d in range(v_head_dim):
                numbers[at + keys_size + slot * v_head_dim + d] = values[to.rows[i], head, d]
