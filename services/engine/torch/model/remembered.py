"""The probe has seen what a model definition keeps of a sequence; it is grouped here. This module is pure.

    group 0        full attention, whose pages the radix tree knows; or a latent
    1, 2, ...      windows, one group for each shape and width
    the last one   recurrent: one slot holds the states of all recurrent layers

A model all of whose attention has windows keeps it in group 0, whole: there a window only masks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from services.values.errors import ConfigError
from services.values.kv import GroupKind, KvGroup

StateKind = Literal["conv", "recurrent"]
StateName = tuple[int, StateKind, int]  # layer_idx, kind, and which of them: some layers have several


@dataclass(frozen=True, slots=True)
class AttentionShape:
    kind: GroupKind
    window: int  # tokens; 0 with full attention
    num_kv_heads: int  # 1 with a latent
    head_dim: int
    v_head_dim: int  # 0: a latent
    dtype: torch.dtype

    @property
    def page(self) -> tuple[object, ...]:
        """Return what its pages look like, whatever a token sees of them."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim, self.dtype


@dataclass(frozen=True, slots=True)
class AttentionCall:
    layer_idx: int  # the cache knows by it the layer whose K and V it reads
    is_stored: bool  # otherwise another layer has stored them
    shape: AttentionShape
    num_heads: int


@dataclass(frozen=True, slots=True)
class State:
    """A state is a convolution's last inputs, or what a scan goes on from; it is one sequence's."""

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
class Remembered:
    calls: tuple[AttentionCall, ...]
    mixers: tuple[Mixer, ...]
    states: tuple[State, ...]  # by name
    read_linears: frozenset[torch.nn.Module] = frozenset()  # they are never called: others read their weights
    logits_dtype: torch.dtype = torch.float32  # Some definitions widen what their heads give.

    @property
    def longest_window(self) -> int:
        return max((call.shape.window for call in self.calls), default=0)


def attention_groups(calls: Sequence[AttentionCall]) -> tuple[KvGroup, ...]:
    """Return group 0, then the windowed ones; `unit_bytes` are left to the pools.

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
    """Return one group of all layers: what windows keep is kept whole.

    Raises ConfigError where pages are not alike.
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
