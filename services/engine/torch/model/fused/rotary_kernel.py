"""Rotary embedding of a step's queries and keys on a CPU, in float32: compiled by numba."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.torch.compiled import compiled, inner

Floats = NDArray[np.float32]


def rotate(queries: Floats, keys: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
    """Both [1, num_tokens, heads, head_dim], by their tokens' `cos` and `sin` [1, num_tokens, head_dim].

    Number i of a head turns with number i + head_dim / 2. Gives the same bits as torch, number by number.
    """
    # Contiguous, whatever they are views of: for another order the kernel would be compiled anew.
    given = [np.ascontiguousarray(numbers) for numbers in (queries, keys, cos, sin)]
    rotated = np.empty_like(given[0]), np.empty_like(given[1])
    _rotate(*given, *rotated)
    return rotated


@compiled()
def _rotate(queries: Any, keys: Any, cos: Any, sin: Any, rotated_queries: Any, rotated_keys: Any) -> None:
    for token in range(cos.shape[1]):
        _rotate_token(queries[0, token], cos[0, token], sin[0, token], rotated_queries[0, token])
        _rotate_token(keys[0, token], cos[0, token], sin[0, token], rotated_keys[0, token])


@inner()
def _rotate_token(heads: Any, cos: Any, sin: Any, rotated: Any) -> None:
    """Every product and sum is rounded by itself."""
    num_heads, head_dim = heads.shape
    half = head_dim // 2
    for head in range(num_heads):
        for i in range(half):
            low, high = heads[head, i], heads[head, half + i]
            rotated[head, i] = low * cos[i] - high * sin[i]
            rotated[head, half + i] = high * cos[half + i] + low * sin[half + i]
