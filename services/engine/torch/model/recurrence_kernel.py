"""A kernel that numba compiles computes a recurrence of several sequences, on the states in place.

The delta rule (Gated DeltaNet, arXiv 2412.06464) is S = d S; S += k (b (v - k S)); o = q S.
Mamba-2 (arXiv 2405.21060) is S = d S + x B; o = S C.

Each sequence and head is computed so, with a decay d. torch's own reference passes over all states six times,
and copies them before and after. Here a head's state is read from memory once for all tokens of a sequence,
and written once or not at all; meanwhile the operands of both products lie in the processor's cache.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.engine.torch.compiled import compiled

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Runs(NamedTuple):
    """Run i is tokens [firsts[i], ends[i]) of a sequence whose state begins at starts[i] of the numbers."""

    starts: Ids
    firsts: Ids
    ends: Ids
    waits: NDArray[np.bool]  # The state of a run that waits stays unchanged.


# Sums may be computed in any order, since LLVM cannot vectorize a sum over a row otherwise.
_compiled = compiled(fastmath={"reassoc", "contract"})


def delta_rule(
    numbers: Floats,
    runs: Runs,
    query: Floats,
    key: Floats,
    value: Floats,
    decay: Floats,
    beta: Floats,
    *,
    shares: Sequence[range],
    executor: Executor | None = None,
) -> Floats:
    """Return the outputs [num_tokens, heads, d_v]; those of tokens in no run are undefined.

    States are [heads, d_k, d_v]. `query` and `key` are [num_tokens, heads, d_k], `value` is [num_tokens,
    heads, d_v], `decay` and `beta` are [num_tokens, heads]. `shares` cuts [0, num_runs * heads): the caller
    computes the first share, and the executor the others.
    """
    output = np.empty_like(value)
    _run(partial(_delta_rule, numbers, runs, query, key, value, decay, beta, output), shares, executor)
    return output


def mamba2(
    numbers: Floats,
    runs: Runs,
    inputs: Floats,
    decay: Floats,
    b: Floats,
    c: Floats,
    *,
    shares: Sequence[range],
    executor: Executor | None = None,
) -> Floats:
    """Return the outputs [num_tokens, heads, head_dim]; those of tokens in no run are undefined.

    States are [heads, head_dim, d_state]. `inputs` [num_tokens, heads, head_dim] are already multiplied by
    their time step, `decay` is [num_tokens, heads], `b` and `c` are [num_tokens, groups, d_state]. `shares`
    is as in delta_rule.
    """
    output = np.empty_like(inputs)
    _run(partial(_mamba2, numbers, runs, inputs, decay, b, c, output), shares, executor)
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
    runs: Any,
    query: Any,
    key: Any,
    value: Any,
    decay: Any,
    beta: Any,
    output: Any,
    first: Any,
    end: Any,
) -> None:
    """Item i * heads + h of [first, end) is run i, head h."""
    num_heads, d_k, d_v = query.shape[1], query.shape[2], value.shape[2]
    change, copied = np.empty(d_v, np.float32), np.empty(d_k * d_v, np.float32)
    for item in range(first, end):
        i, head = item // num_heads, item % num_heads
        start = runs.starts[i] + head * d_k * d_v
        state = numbers[start : start + d_k * d_v]
        if runs.waits[i]:
            copied[:] = state
            state = copied
        for row in range(runs.firsts[i], runs.ends[i]):
            result, kept = output[row, head], decay[row, head]
            change[:] = 0.0
            for k in range(d_k):
                weight = kept * key[row, head, k]
                for v in range(d_v):
                    change[v] += weight * state[k * d_v + v]
            for v in range(d_v):
                change[v] = (value[row, head, v] - change[v]) * beta[row, head]
                result[v] = 0.0
            for k in range(d_k):
                weight, factor = key[row, head, k], query[row, head, k]
                for v in range(d_v):
                    number = kept * state[k * d_v + v] + weight * change[v]
                    state[k * d_v + v] = number
                    result[v] += factor * number


@_compiled
def _mamba2(
    numbers: Any,
    runs: Any,
    inputs: Any,
    decay: Any,
    b: Any,
    c: Any,
    output: Any,
    first: Any,
    end: Any,
) -> None:
    num_heads, head_dim, d_state = inputs.shape[1], inputs.shape[2], b.shape[2]
    heads_of_group = num_heads // b.shape[1]
    copied = np.empty(head_dim * d_state, np.float32)
    for item in range(first, end):
        i, head = item // num_heads, item % num_heads
        group, start = head // heads_of_group, runs.starts[i] + head * head_dim * d_state
        state = numbers[start : start + head_dim * d_state]
        if runs.waits[i]:
            copied[:] = state
            state = copied
        for row in range(runs.firsts[i], runs.ends[i]):
            kept = decay[row, head]
            for p in range(head_dim):
                weight, total = inputs[row, head, p], np.float32(0.0)
                for n in range(d_state):
                    number = kept * state[p * d_state + n] + weight * b[row, group, n]
                    state[p * d_state + n] = number
                    total += number * c[row, group, n]
                output[row, head, p] = total
