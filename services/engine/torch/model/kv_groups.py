"""This module groups what the probe found that a model stores for a sequence. It is pure.

Group 0 is full attention, whose pages the radix tree knows, or a latent. The next groups are windows, one for
each shape and width. The last one is recurrent: one slot holds the states of all recurrent layers.

A model whose attention has windows in all layers stores all its KV in group 0; there a window only masks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from services.values.errors import ConfigError
from services.values.kv import GroupKind, KvGroup

StateKind = Literal["conv", "recurrent"]
# The parts are layer_idx, the kind, and an index, since some layers have several.
StateName = tuple[int, StateKind, int]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    kind: GroupKind
    window: int  # This is in tokens, and 0 with full attention.
    num_kv_heads: int  # This is 1 with a latent.
    head_dim: int
    v_head_dim: int  # With 0 it is a latent.
    dtype: torch.dtype

    @property
    def page(self) -> tuple[object, ...]:
        """Return the properties that decide the layout of its pages, without what a token sees of them."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim, self.dtype


@dataclass(frozen=True, slots=True)
class AttentionCall:
    layer_idx: int  # In the cache this is the layer whose K and V are read.
    is_stored: bool  # Otherwise another layer has stored them.
    shape: AttentionShape
    num_heads: int
    is_capped: bool = False  # Its scores have a soft cap.


@dataclass(frozen=True, slots=True)
class State:
    """A state is a convolution's last inputs, or the state of a scan; it belongs to one sequence."""

    name: StateName
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Mixer:
    module: torch.nn.Module
    states: tuple[StateName, ...]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    calls: tuple[AttentionCall, ...]
    mixers: tuple[Mixer, ...]
    states: tuple[State, ...]  # They are in order of their names.
    # These layers are never called: other modules read their weights.
    read_linears: frozenset[torch.nn.Module] = frozenset()
    # All tokens go through these layers, in order and once; none is of a mixer, an expert or the head.
    whole_linears: frozenset[torch.nn.Linear] = frozenset()
    logits_dtype: torch.dtype = torch.float32  # Some definitions widen the head's output.

    @property
    def longest_window(self) -> int:
        return max((call.shape.window for call in self.calls), default=0)


def attention_groups(calls: Sequence[AttentionCall]) -> tuple[KvGroup, ...]:
    """Return group 0, then the windowed groups; the pools compute `unit_bytes`.

    Raises ConfigError where there is no attention, or full attention of several shapes.
    """
    by_shape = _by_shape(calls)
    full = [shape for shape in by_shape if not shape.kind.is_windowed]
    if not full:
        return (_all_as_full(by_shape),)
    if len(full) > 1:
        raise ConfigError(f"its full-attention layers keep K and V of {len(full)} shapes: {_shapes(full)}")
    windowed = [shape for shape in by_shape if shape.kind.is_windowed]
    return tuple(_group(shape, by_shape[shape]) for shape in (*full, *windowed))


def whole_group(calls: Sequence[AttentionCall]) -> KvGroup:
    """Return one group of all layers, which also stores the whole KV of layers with windows.

    Raises ConfigError where the layers' pages have different layouts.
    """
    return _all_as_full(_by_shape(calls))


def _by_shape(calls: Sequence[AttentionCall]) -> dict[AttentionShape, list[int]]:
    by_shape: dict[AttentionShape, list[int]] = {}
    for call in calls:
        if call.is_stored:
            by_shape.setdefault(call.shape, []).append(call.layer_idx)
    return by_shape


def _all_as_full(by_shape: Mapping[AttentionShape, Sequence[int]]) -> KvGroup:
    if not by_shape:
        raise ConfigError("it has no attention: nothing of it could be found again by its prefix")
    if len({shape.page for shape in by_shape}) > 1:
        raise ConfigError(f"its windows cannot be kept whole: K and V are of shapes: {_shapes(by_shape)}")
    whole = replace(next(iter(by_shape)), kind=GroupKind.FULL_ATTENTION, window=0)
    return _group(whole, sorted(layer for layers in by_shape.values() for layer in layers))


def _group(shape: AttentionShape, layer_ids: Sequence[int]) -> KvGroup:
    return KvGroup(
        shape.kind,
        tuple(layer_ids),
        shape.num_kv_heads,
        shape.head_dim,
        dtype_name(shape.dtype),
        v_head_dim=None if shape.v_head_dim == shape.head_dim else shape.v_head_dim,
        window=shape.window,
    )


def recurrent_group(states: Sequence[State], dtype: str) -> KvGroup:
    layer_ids = tuple(sorted({state.name[0] for state in states}))
    return KvGroup(GroupKind.RECURRENT, layer_ids, 0, 0, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes(shapes: Mapping[AttentionShape, object] | Sequence[AttentionShape]) -> str:
    return ", ".join(
        f"{shape.num_kv_heads} heads of {shape.head_dim} and {shape.v_head_dim}" for shape in shapes
    )
