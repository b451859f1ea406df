"""A tape records a step's calls on a CPU, and makes them again: what a CUDA graph does, without a GPU.

As with a graph, the second time nothing of the definition's Python runs: only its operations do, on the
memory that they had the first time. What waits for a value is refused.
"""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_NAMES = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select")
WAITING = {f"aten::{name}" for name in _NAMES}
_tapes = []


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in WAITING:
            raise RuntimeError(f"{func._schema.name} waits for the device")
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, given))
        return given

    def call(self, kernel, args, named):
        with _disable_current_modes():
            given = kernel(*args, **named)
        self._calls.append((None, kernel, (args, named), given))
        return given

    def replay(self):
        with torch.inference_mode():
            for func, args, kwargs, given in self._calls:
                if func is None:
                    _copy(args(*kwargs[0], **kwargs[1]), given)
                else:
                    _again(func, args, kwargs, given)


def _again(func, args, kwargs, given):
    name, schema = func._schema.name, func._schema
    if "empty" in name or "lift_fresh" in name:
        return
    aliases = [each.alias_info for each in (*schema.returns, *schema.arguments)]
    writes = any(alias is not None and alias.is_write for alias in aliases)
    before = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    held = {each.untyped_storage().data_ptr() for each in inputs if each.untyped_storage().nbytes()}
    if not writes and before and all(each.untyped_storage().data_ptr() in held for each in before):
        return  # a view stays one
    after = func(*args, **kwargs)
    if not writes:
        _copy(after, before)


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


def recorded(kernel):
    """Return the kernel as one call of a tape: what it does in Python is done again, too."""

    @functools.wraps(kernel)
    def call(*args, **named):
        return _tapes[-1].call(kernel, args, named) if _tapes else kernel(*args, **named)

    return call
