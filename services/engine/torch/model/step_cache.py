"""A model takes this for its `Cache` in a step over pages and slots (cache_utils.py of transformers).

Attention is told by it which layer it is, mixers find their states in it. What it lacks raises
AttributeError, and so refuses the model when that is probed or checked.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.engine.torch.attention.latent import store_and_gather
from services.engine.torch.attention.step_view import StepView
from services.engine.torch.model.handed_states import ConvStates, RecurrentStates, Take
from services.engine.torch.model.remembered import AttentionCall, StateKind
from services.engine.torch.model.slots import SlotPool
from services.engine.torch.model.token_runs import TokenRuns
from services.values.errors import ConfigError


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name by which the model's forward takes the cache: transformers 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass
class LayerStates:
    """`cache.layers[i]` has states [batch, ...] by their index.

    They are those of the sequences that a mixer now computes.
    """

    conv_states: dict[int, Any] = field(default_factory=dict)  # or ConvStates
    recurrent_states: dict[int, Any] = field(default_factory=dict)  # or RecurrentStates
    record_past = False

    def of_kind(self, kind: StateKind) -> dict[int, Any]:
        return self.conv_states if kind == "conv" else self.recurrent_states


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """A mixer computes these rows of the step as one sequence, [1, tokens, hidden]."""

    rows: Tensor  # int64
    slot: Tensor  # int64 [1]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A mixer computes these rows token by token, [num_tokens, 1, hidden]."""

    rows: Tensor  # int64
    runs: TokenRuns


class StepCache:
    """The cache is of one step. The states of `layers` are put there before a mixer runs (mixers.py)."""

    is_compileable = False

    slots: SlotPool | None = None  # the rest of these are there with it, where there are mixers
    in_place = False
    scan_tokens: int | None = None  # with None a chunk is one scan
    sequences: Sequence[SequenceRows] = ()
    tokens: TokenRows | None = None

    def __init__(self, calls: Sequence[AttentionCall], positions: Tensor) -> None:
        self.waiting: list[Take] = []  # each mixer has one, where a run of its tokens waits
        self.layers = _Layers()
        self.view: StepView | None = None  # the view knows this cache
        self._calls = iter(calls)
        self._stored: int | None = None
        self.device = positions.device
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    # Attention asks for these.

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return what attention gets of a layer.

        Of a latent, that is what is kept of all tokens that the step sees.
        """
        self._stored = layer_idx
        assert self.view is not None
        if self.view.of_layer(layer_idx)[0].kv.is_latent:
            return store_and_gather(self.view, layer_idx, key, value)
        return key, value

    def take(self) -> tuple[int, bool]:
        call, stored, self._stored = next(self._calls, None), self._stored, None
        if call is None or call.is_stored != (stored is not None):
            raise ConfigError("the model attends in another order than when it was probed")
        if stored is not None and stored != call.layer_idx:
            raise ConfigError(f"layer {stored} attends where layer {call.layer_idx} did when it was probed")
        return call.layer_idx, call.is_stored

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return int64 [total]: what a row's place in the step lacks of its position.

        Who asks adds an arange over the rows, and has the positions (Llama 4's temperature, whoever makes
        position_ids itself).
        """
        return self._offsets

    get_query_offset = get_seq_length

    # Mixers ask for these.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True: the state of a sequence that begins is zeros, which gives what none gives."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # From transformers 5.21 on mixers ask for their states; before they look into `layers` themselves.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx].conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx].recurrent_states[state_idx]

    def update_conv_state(self, inputs: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take `inputs` [batch, channels, tokens], and return what the state has before them, too."""
        state = self.layers[layer_idx].conv_states[state_idx]
        if isinstance(state, ConvStates):
            return torch.cat([state.before(inputs), inputs], dim=-1)
        whole = torch.cat([state, inputs], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(self, state: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        if isinstance(state, RecurrentStates):
            return state
        return self.layers[layer_idx].recurrent_states[state_idx].copy_(state)


class _Layers(dict[int, LayerStates]):
    def __missing__(self, layer_idx: int) -> LayerStates:
        self[layer_idx] = LayerStates()
        return self[layer_idx]
