"""Attention of single tokens over pages, where they lie: one pass over K and V, compiled by numba.

torch's kernels for the CPU are made for many queries. With one they take twice as long (2,112 tokens of 4 KV
heads, head_dim 64, float32, one thread: 0.8 ms against 0.4 ms), and want a call for each stretch of pages.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class PageReads(NamedTuple):
    """Query i reads the first tokens[j] slots of pages[j], for each j from starts[i] to starts[i + 1]."""

    pages: Ids
    tokens: Ids
    starts: Ids  # [num_queries + 1]


class Partials(NamedTuple):
    """What was attended to elsewhere: query i takes blocks[j], for each j from starts[i] to starts[i + 1].

    A block is a row for each head of a KV head's group, for each KV head within.
    """

    blocks: Ids
    starts: Ids  # [num_queries + 1]
    outputs: Floats  # [num_rows, head_dim]
    log_sums: Floats  # [num_rows], log-sum-exps of the scores


def attend_pages(
    query: Floats,
    kv: NDArray[Any],
    layer: int,
    reads: PageReads,
    partials: Partials,
    scaling: float,
    *,
    shares: Sequence[range] = (),
    executor: Executor | None = None,
) -> Floats:
    """Each query's attention over all that it reads, [num_queries, num_heads, head_dim] as `query`.

    `kv` is the pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], of float32, or bfloat16
    as uint16. A query that reads nothing yields zeros. `shares` cut [0, num_queries * num_kv_heads) into what
    the caller computes and, beside it, the `executor`; without one there is a single share.
    """
    output = np.empty_like(query)
    attend = partial(_attend, query, kv, layer, reads, partials, np.float32(scaling), output)
    own, *others = shares or [range(len(query) * kv.shape[3])]
    assert executor is not None or not others
    futures = [executor.submit(attend, share.start, share.stop) for share in others] if executor else []
    attend(own.start, own.stop)
    for future in futures:
        future.result()
    return output


def _as_float(value: Any) -> Any:
    """One number of the pool. Of bfloat16 numpy knows nothing, but it is the upper half of a float32."""
    raise NotImplementedError("compiled code only")


@overload(_as_float, inline="always")
def _as_float_of(value):  # type: ignore[no-untyped-def]  # numba wants the very signature of what it returns
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << 16).view(np.float32)


# What the order of additions and fused multiply-adds may change; infinity and NaN stay what they are.
@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
def _attend(
    query: Any,
    kv: Any,
    layer: Any,
    reads: Any,
    partials: Any,
    scaling: Any,
    output: Any,
    first: Any,
    end: Any,
) -> None:
    """Item i * num_kv_heads + k of [first, end) are the heads of query i that share KV head k."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, page_size = kv.shape[3], kv.shape[4]
    group = num_heads // num_kv_heads
    scaled = np.empty((group, head_dim), np.float32)
    scores = np.empty((page_size, group), np.float32)
    weighted = np.empty((group, head_dim), np.float32)
    # Of the softmax so far: the greatest score, and the sum of all exponentials over that one's.
    greatest, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for item in range(first, end):
        i, kv_head = item // num_kv_heads, item % num_kv_heads
        first_head = kv_head * group
        for g in range(group):
            greatest[g], total[g] = -np.inf, 0.0
            for d in range(head_dim):
                scaled[g, d] = query[i, first_head + g, d] * scaling
                weighted[g, d] = 0.0
        for j in range(reads.starts[i], reads.starts[i + 1]):
            keys = kv[reads.pages[j], layer, 0, kv_head]
            values = kv[reads.pages[j], layer, 1, kv_head]
            num_tokens = reads.tokens[j]
            for slot in range(num_tokens):
                for g in range(group):
                    score = np.float32(0.0)
                    for d in range(head_dim):
                        score += scaled[g, d] * _as_float(keys[slot, d])
                    scores[slot, g] = score
            for g in range(group):
                peak = greatest[g]
                for slot in range(num_tokens):
                    peak = max(peak, scores[slot, g])
                shrunk = np.exp(greatest[g] - peak)
                greatest[g] = peak
                total[g] *= shrunk
                for d in range(head_dim):
                    weighted[g, d] *= shrunk
                for slot in range(num_tokens):
                    scores[slot, g] = np.exp(scores[slot, g] - peak)
                    total[g] += scores[slot, g]
            for slot in range(num_tokens):
                for g in range(group):
                    weight = scores[slot, g]
                    for d in range(head_dim):
                        weighted[g, d] += weight * _as_float(values[slot, d])
        for g in range(group if partials.starts[i] < partials.starts[i + 1] else 0):
            peak = greatest[g]
            for j in range(partials.starts[i], partials.starts[i + 1]):
                row = (partials.blocks[j] * group + g) * num_kv_heads + kv_head
                peak = max(peak, partials.log_sums[row])
            shrunk = np.exp(greatest[g] - peak)
            total[g] *= shrunk
            for d in range(head_dim):
                weighted[g, d] *= shrunk
            for j in range(partials.starts[i], partials.starts[i + 1]):
                row = (partials.blocks[j] * group + g) * num_kv_heads + kv_head
                weight = np.exp(partials.log_sums[row] - peak)
                total[g] += weight
                for d in range(head_dim):
                    weighted[g, d] += weight * partials.outputs[row, d]
        for g in range(group):
            share = 1.0 / total[g] if total[g] > 0.0 else 0.0
            for d in range(head_dim):
                output[i, first_head + g, d] = weighted[g, d] * share
