"""A tape records a step's calls on a CPU, and makes them again: what a CUDA graph does, without a GPU.

As with a graph, the second time nothing of the definition's Python runs: only its operations do, on the
memory that they had the first time. What waits for a value is refused.
"""

import functools
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_NAMES = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select")
WAITING = {f"aten::{name}" for name in _NAMES}
_tapes = []


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls, self._memory = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in WAITING:
            raise RuntimeError(f"{func._schema.name} waits for the device")
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        self._memory.append((args, kwargs, given))
        again = _again(func, args, kwargs, given)
        if again is not None:
            self._calls.append(again)
        return given

    def call(self, kernel, args, named):
        with _disable_current_modes():
            given = kernel(*args, **named)
        self._calls.append(lambda: _copy(kernel(*args, **named), given))
        return given

    def replay(self):
        with torch.inference_mode():
            for call in self._calls:
                call()


@functools.cache
def _makes_memory(func):
    return "empty" in func._schema.name or "lift_fresh" in func._schema.name


@functools.cache
def _writes(func):
    aliases = [each.alias_info for each in (*func._schema.returns, *func._schema.arguments)]
    return any(alias is not None and alias.is_write for alias in aliases)


def _again(func, args, kwargs, given):
    """Return a function that makes the call again in the same memory, or None where that is nothing."""
    if _makes_memory(func):
        return None
    if _writes(func):
        return lambda: func(*args, **kwargs)
    before = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    held = {each.untyped_storage().data_ptr() for each in inputs if each.untyped_storage().nbytes()}
    if before and all(each.untyped_storage().data_ptr() in held for each in before):
        return None  # a view stays one
    return lambda: _copy(func(*args, **kwargs), before)


def _copy(after, before):
    """What comes later has the tensors of the first time."""
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    for old, new in pairs:
        if isinstance(old, torch.Tensor):
            old.copy_(new)


def capture(compute):
    """A Capture of StepGraphs."""
    compute()
    tape = Tape()
    _tapes.append(tape)
    try:
        with tape:
            compute()
    finally:
        _tapes.pop()
    return tape.replay


def computed_again(compute):
    """A Capture that runs the definition again each time."""
    compute()
    return compute


class Either:
    """A Capture whose steps are replayed, or while `computing` run the definition again in their memory."""

    def __init__(self):
        self._replays = True

    def __call__(self, compute):
        replay = capture(compute)
        return lambda: (replay if self._replays else compute)()

    @contextmanager
    def computing(self):
        self._replays = False
        yield
        self._replays = True


def recorded(kernel):
    """Return the kernel as one call of a tape: what it does in Python is done again, too."""

    @functools.wraps(kernel)
    def call(*args, **named):
        return _tapes[-1].call(kernel, args, named) if _tapes else kernel(*args, **named)

    return call
