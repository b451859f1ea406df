"""A token of each of several sequences through a recurrence, on the states where they lie: compiled by numba.

    delta rule (Gated DeltaNet, arXiv 2412.06464)   S = d S;  S += k (b (v - k S));  o = q S
    Mamba-2 (arXiv 2405.21060)                      S = d S + x B;                   o = S C

for each sequence and head, with a decay d. torch's own reference takes six passes over all states, and copies
of them before and after. Here a head's state is read from memory once and written once: what two products
need lies in the processor's cache meanwhile.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Sums in any order: else a sum over a row is no vector's.
_compiled = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"}, no_cfunc_wrapper=True)


def delta_rule(
    numbers: Floats,
    starts: Ids,
    query: Floats,
    key: Floats,
    value: Floats,
    decay: Floats,
    beta: Floats,
    *,
    shares: Sequence[range],
    executor: Executor | None = None,
) -> Floats:
    """Gives [m, heads, d_v]. States [heads, d_k, d_v] begin at `starts` [m] of the pool's numbers; they are
    read and written.

    `query` and `key` are [m, heads, d_k], `value` [m, heads, d_v], `decay` and `beta` [m, heads]. `shares`
    cut [0, m * heads) into what the caller computes and, beside it, the executor.
    """
    output = np.empty_like(value)
    _run(partial(_delta_rule, numbers, starts, query, key, value, decay, beta, output), shares, executor)
    return output


def mamba2(
    numbers: Floats,
    starts: Ids,
    inputs: Floats,
    decay: Floats,
    b: Floats,
    c: Floats,
    *,
    shares: Sequence[range],
    executor: Executor | None = None,
) -> Floats:
    """Gives [m, heads, head_dim]. States [heads, head_dim, d_state] begin at `starts` [m] of the pool's
    numbers; they are read and written.

    `inputs` [m, heads, head_dim] are multiplied by their time step, `decay` is [m, heads], `b` and `c` [m,
    groups, d_state]. `shares` as in delta_rule.
    """
    output = np.empty_like(inputs)
    _run(partial(_mamba2, numbers, starts, inputs, decay, b, c, output), shares, executor)
    return output


def _run(compute: Callable[[int, int], Any], shares: Sequence[range], executor: Executor | None) -> None:
    own, *others = shares
    assert executor is not None or not others
    futures = [executor.submit(compute, share.start, share.stop) for share in others] if executor else []
    compute(own.start, own.stop)
    for future in futures:
        future.result()


@_compiled
def _delta_rule(
    numbers: Any,
    starts: Any,
    query: Any,
    key: Any,
    value: Any,
    decay: Any,
    beta: Any,
    output: Any,
    first: Any,
    end: Any,
) -> None:
    """Item i * heads + h of [first, end): sequence i, head h."""
    num_heads, d_k, d_v = query.shape[1], query.shape[2], value.shape[2]
    change = np.empty(d_v, np.float32)
    for item in range(first, end):
        i, head = item // num_heads, item % num_heads
        start = starts[i] + head * d_k * d_v
        state, result = numbers[start : start + d_k * d_v], output[i, head]
        kept = decay[i, head]
        change[:] = 0.0
        for k in range(d_k):
            weight = kept * key[i, head, k]
            for v in range(d_v):
                change[v] += weight * state[k * d_v + v]
        for v in range(d_v):
            change[v] = (value[i, head, v] - change[v]) * beta[i, head]
            result[v] = 0.0
        for k in range(d_k):
            weight, asked = key[i, head, k], query[i, head, k]
            for v in range(d_v):
                number = kept * state[k * d_v + v] + weight * change[v]
                state[k * d_v + v] = number
                result[v] += asked * number


@_compiled
def _mamba2(
    numbers: Any,
    starts: Any,
    inputs: Any,
    decay: Any,
    b: Any,
    c: Any,
    output: Any,
    first: Any,
    end: Any,
) -> None:
    """Item i * heads + h of [first, end): sequence i, head h."""
    num_heads, head_dim, d_state = inputs.shape[1], inputs.shape[2], b.shape[2]
    heads_of_group = num_heads // b.shape[1]
    for item in range(first, end):
        i, head = item // num_heads, item % num_heads
        group, start = head // heads_of_group, starts[i] + head * head_dim * d_state
        state, kept = numbers[start : start + head_dim * d_state], decay[i, head]
        for p in range(head_dim):
            weight, total = inputs[i, head, p], np.float32(0.0)
            for n in range(d_state):
                number = kept * state[p * d_state + n] + weight * b[i, group, n]
                state[p * d_state + n] = number
                total += number * c[i, group, n]
            output[i, head, p] = total
