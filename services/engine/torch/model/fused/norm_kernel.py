"""RMS norms of rows on a CPU, in float32: compiled by numba. A row's numbers do not depend on the others."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.torch.compiled import compiled

Floats = NDArray[np.float32]


def rms_norm(rows: Floats, weight: Floats, epsilon: float) -> Floats:
    """Each of the `rows` [.., width] over the root of its mean square, times the weight [width]."""
    # Contiguous, whatever `rows` is a view of: for another order the kernel would be compiled anew.
    flat = np.ascontiguousarray(rows).reshape(-1, len(weight))
    normed = np.empty_like(flat)
    _normalize(flat, weight, epsilon, normed)
    return normed.reshape(rows.shape)


# Sums in any order: else a sum over a row is no vector's.
@compiled(fastmath={"reassoc", "contract"})
def _normalize(rows: Any, weight: Any, epsilon: Any, normed: Any) -> None:
    num_rows, width = rows.shape
    for row in range(num_rows):
        squares = np.float32(0.0)
        for i in range(width):
            squares += rows[row, i] * rows[row, i]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
        for i in range(width):
            normed[row, i] = weight[i] * (rows[row, i] * scale)
