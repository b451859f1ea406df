"""What a model takes for its `Cache` in a step over pages and slots (cache_utils.py of transformers).

Attention is told by it which layer it is, mixers find their states in it. What it lacks raises
AttributeError, and so refuses the model when that is probed or checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.engine.torch.attention.latent import store_and_gather
from services.engine.torch.attention.step_view import StepView
from services.engine.torch.model.remembered import AttentionCall, StateKind
from services.engine.torch.model.slots import SlotPool, StatesInPlace
from services.values.errors import ConfigError


@dataclass
class LayerStates:
    """`cache.layers[i]`: states [batch, ...] by their index, of the sequences that a mixer now computes."""

    conv_states: dict[int, Any] = field(default_factory=dict)
    recurrent_states: dict[int, Any] = field(default_factory=dict)  # or StatesInPlace
    record_past = False

    def of_kind(self, kind: StateKind) -> dict[int, Any]:
        return self.conv_states if kind == "conv" else self.recurrent_states


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of the step that a mixer computes as one batch [num_slots, tokens each, hidden]."""

    rows: Tensor  # int64
    slots: Tensor  # int64

    @property
    def are_singles(self) -> bool:
        return len(self.rows) == len(self.slots)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Of the chunks with drafts, those with the most first.

    `rounds[j]` are the rows, int64, of the j-th tokens of as many of them as have one.
    """

    chunks: Sequence[int]  # of the step
    slots: Sequence[int]  # of each
    rounds: Sequence[Tensor]

    def first(self, counts: Sequence[int]) -> tuple[SequenceRows, ...]:
        """The first counts[i] tokens of chunk i of the step, to be computed one round after another."""
        parts = []
        own = [counts[chunk] for chunk in self.chunks]
        for nth, rows in enumerate(self.rounds[: max(own)]):
            has_one = [i for i, count in enumerate(own) if count > nth]
            slots = torch.tensor([self.slots[i] for i in has_one], device=rows.device)
            parts.append(SequenceRows(rows[has_one], slots))
        return tuple(parts)


# With how many tokens of each of the step's chunks the states are to take in of those with drafts.
Recompute = Callable[[Sequence[int]], None]


class StepCache:
    """Of one step. The states of `layers` are put there before a mixer runs (mixers.py)."""

    is_compileable = False

    slots: SlotPool | None = None  # with the rest of these, where there are mixers
    in_place = False
    parts: Sequence[SequenceRows] = ()
    drafts: DraftRows | None = None

    def __init__(self, calls: Sequence[AttentionCall], positions: Tensor) -> None:
        """`positions` are int64 [total]."""
        self.recomputed: list[Recompute] = []  # of each mixer: its states go on when choices are known
        self.layers = _Layers()
        self.view: StepView | None = None  # which knows this cache
        self._calls = iter(calls)
        self._stored: int | None = None
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    # As attention asks

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Of a latent: what is kept of all tokens that the step sees."""
        self._stored = layer_idx
        assert self.view is not None
        if self.view.of_layer(layer_idx)[0].kv.is_latent:
            return store_and_gather(self.view, layer_idx, key, value)
        return key, value

    def take(self) -> tuple[int, bool]:
        """See attention/layers.py: StoredLayers."""
        call, stored, self._stored = next(self._calls, None), self._stored, None
        if call is None or call.is_stored != (stored is not None):
            raise ConfigError("the model attends in another order than when it was probed")
        if stored is not None and stored != call.layer_idx:
            raise ConfigError(f"layer {stored} attends where layer {call.layer_idx} did when it was probed")
        return call.layer_idx, call.is_stored

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Int64 [total]: what a row's place in the step lacks of its position.

        Who asks adds an arange over the rows, and has the positions (Llama 4's temperature, whoever makes
        position_ids itself).
        """
        return self._offsets

    get_query_offset = get_seq_length

    # As mixers ask

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Always: the state of a sequence that begins is zeros, which gives what none gives."""
        return True

    def update_conv_state(self, inputs: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """`inputs` are [batch, channels, tokens]; gives what the state has before them, too."""
        state = self.layers[layer_idx].conv_states[state_idx]
        whole = torch.cat([state, inputs], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(self, state: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        if isinstance(state, StatesInPlace):
            return state
        return self.layers[layer_idx].recurrent_states[state_idx].copy_(state)


class _Layers(dict[int, LayerStates]):
    def __missing__(self, layer_idx: int) -> LayerStates:
        self[layer_idx] = LayerStates()
        return self[layer_idx]
