"""A table, made once at the start, says which layer keeps K and V where, and how far back it sees.

    pools      0 is of full attention, the others of the windowed groups: pool i has the pages of tails[i - 1]
    reach      a pool, and what its tokens see: a step is worked out once for each (step_view.py)
    place      of a layer: its reach, and which of its pool's layers it is

A model all of whose layers have a window keeps them in pool 0, whole: there a window only masks.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.engine.torch.attention.kernels.piece_parts import OnDevice
from services.engine.torch.attention.paged_kv import PagedKv
from services.engine.torch.attention.prompts import Packing
from services.values.kv import GroupKind

Position = TypeVar("Position", int, Tensor, NDArray[np.int64])


class StoredLayers(Protocol):
    def take(self) -> tuple[int, bool]:
        """Tell which layer's K and V the running attention is to read, and whether it stores its own there.

        It returns (layer_idx, True) after the model's `cache.update(key, value, layer_idx)`, once; else (the
        layer whose K and V the running one shares, False).
        """


@dataclass(frozen=True, slots=True)
class InPlace:
    num_threads: int = 1
    executor: Executor | None = None  # of num_threads - 1


@dataclass(frozen=True, slots=True)
class Reach:
    """A token at p sees the positions [first_seen(p), p] of its sequence, in the pages of a pool."""

    pool: int
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window: int = 0  # tokens, with itself; 0: all

    def first_seen(self, position: Position) -> Position:
        """Return the first position that a token sees.

        It is negative where the window goes back beyond the sequence's start.
        """
        if self.kind is GroupKind.SLIDING_WINDOW:
            return position - self.window + 1
        if self.kind is GroupKind.CHUNKED_WINDOW:
            return position // self.window * self.window
        return position - position


@dataclass(frozen=True, slots=True)
class LayerPlace:
    reach: Reach
    index: int  # among the layers of the reach's pool


@dataclass(frozen=True)
class PagedLayers:
    """`in_place` says for each pool of a runner how tokens attend; with None they gather.

    `packings` say how chunks that gather do so together; without one they do so one by one.
    """

    pools: Sequence[PagedKv]
    in_place: Sequence[InPlace | OnDevice | None]
    places: Mapping[int, LayerPlace]  # by layer_idx, as the model gives it to cache.update
    packings: Sequence[Packing | None] = ()

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        return tuple(dict.fromkeys(place.reach for place in self.places.values()))

    def packing_of(self, reach: Reach) -> Packing | None:
        if not self.packings or reach.kind is GroupKind.CHUNKED_WINDOW:
            return None
        return self.packings[reach.pool]
