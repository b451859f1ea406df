"""This is a model's `Cache` in a step over pages and slots (see cache_utils.py of transformers).

Attention gets its layer from it, and mixers find their states in it. A missing attribute raises
AttributeError, which refuses the model in its probe or its check.

Recurrent layers compute some tokens one by one (TokenRuns): a sequence's newest token, and the drafts after
it. A mixer passes RecurrentStates and ConvStates in the place of states to a function that does so. With
plain tokens the state is updated at once. With drafts every token is computed from the state after the
previous one, and the stored state stays unchanged; once it is known which drafts are accepted, it is updated
with those (StepCache.waiting).
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from services.engine.torch.attention.paged_attention import store_and_gather
from services.engine.torch.attention.step_view import StepView
from services.engine.torch.device import send
from services.engine.torch.model.kv_groups import AttentionCall, StateKind
from services.engine.torch.model.recurrence_kernel import Ids, Runs
from services.engine.torch.pools import SlotPool
from services.values.errors import ConfigError


@dataclass(frozen=True)
class TokenRuns:
    """Run i is tokens [firsts[i], firsts[i] + counts[i]) of those that are computed one by one, in order."""

    slots: Tensor  # This is the slot of each state, int64 [num_runs].
    firsts: Ids
    counts: Ids
    waits: NDArray[np.bool]  # The state of a run that waits is not updated yet.

    @cached_property
    def some_wait(self) -> bool:
        return bool(self.waits.any())

    @cached_property
    def are_plain(self) -> bool:
        return len(self.firsts) == self.num_tokens and not self.some_wait

    @cached_property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def lengths(self) -> Tensor:
        return self._ids(self.counts)

    @cached_property
    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the run of each token, and the token's index in that run.

        This is wrong for the result of `kept`, whose runs have gaps between them.
        """
        runs = np.repeat(np.arange(len(self.counts)), self.counts)
        places = np.arange(len(runs)) - np.repeat(self.firsts, self.counts)
        return self._ids(runs), self._ids(places)

    @cached_property
    def ended(self) -> Tensor:
        return self._ids(np.flatnonzero(~self.waits))

    @cached_property
    def waiting(self) -> Tensor:
        return self._ids(np.flatnonzero(self.waits))

    def rounds(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all runs with their first tokens, then all longer runs with their second ones, and so on."""
        for nth in range(self.counts.max(initial=0)):
            runs = np.flatnonzero(self.counts > nth)
            yield self._ids(runs), self._ids(self.firsts[runs] + nth)

    def kept(self, counts: Sequence[int]) -> "TokenRuns":
        """Return the waiting runs, cut to the first `counts` tokens, which their states are to include."""
        runs = np.flatnonzero(self.waits)
        return TokenRuns(
            slots=self.slots[self.waiting],
            firsts=self.firsts[runs],
            counts=np.array(counts, np.int64),
            waits=np.zeros(len(runs), np.bool),
        )

    def of_numbers(self, of_slots: Tensor) -> Runs:
        starts = self.slots.numpy() * of_slots.stride(0) + of_slots.storage_offset()
        return Runs(starts, self.firsts, self.firsts + self.counts, self.waits)

    def _ids(self, ids: NDArray[Any]) -> Tensor:
        (sent,) = send([ids], self.slots.device)
        return sent


# Each callback updates waiting states with the accepted tokens.
Take = Callable[[TokenRuns], object]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    of_slots: Tensor  # The shape is [num_slots, ...].
    runs: TokenRuns
    waiting: list[Take]

    @property
    def numbers(self) -> NDArray[np.float32] | None:
        """Return the states' memory for a kernel, or None if it is not float32 in the host's memory."""
        states = self.of_slots
        if states.dtype != torch.float32 or states.device.type != "cpu":
            return None
        size = states.untyped_storage().nbytes() // states.itemsize
        numbers: NDArray[np.float32] = states.as_strided((size,), (1,), 0).numpy()
        return numbers

    def go_on(self, compute: Callable[[TokenRuns], Tensor]) -> Tensor:
        """Return what `compute` returns for the tokens.

        For waiting runs, `compute` is called again when it is known which drafts are accepted.
        """
        if self.runs.some_wait:
            self.waiting.append(compute)
        return compute(self.runs)


@dataclass(frozen=True, slots=True)
class ConvStates:
    """A convolution's states are its last inputs [num_slots, channels, size].

    So the inputs of drafts determine all states.
    """

    of_slots: Tensor
    runs: TokenRuns
    waiting: list[Take]

    def before(self, inputs: Tensor) -> Tensor:
        """Return the inputs before each token, [num_tokens, channels, size].

        `inputs` are [num_tokens, channels, 1].
        """
        states = self.of_slots[self.runs.slots]
        run, place = self.runs.of_tokens
        columns = states.new_zeros(*states.shape[:-1], int(self.runs.counts.max()))
        columns[run, :, place] = inputs[..., 0].to(states.dtype)
        # The axes are [num_runs, channels, tokens + 1, size]: the state after so many of its tokens.
        windows = torch.cat([states, columns], dim=-1).unfold(-1, states.shape[-1], 1)
        self._store(self.runs.ended, windows, self.runs.lengths[self.runs.ended])
        if self.runs.some_wait:
            self.waiting.append(lambda kept: self._store(self.runs.waiting, windows, kept.lengths))
        return windows[run, :, place]

    def _store(self, runs: Tensor, windows: Tensor, counts: Tensor) -> None:
        self.of_slots[self.runs.slots[runs]] = windows[runs, :, counts]


def by_rounds(
    of_slots: Mapping[Name, Tensor],
    runs: TokenRuns,
    num_tokens: int,
    step: Callable[[dict[Name, Tensor], Tensor], Tensor],
) -> Tensor:
    """Return the outputs of `num_tokens` tokens, of which those in no run are zeros.

    `step` computes one token of each of some runs: it gets their states [m, ..] by name, which it writes or
    replaces, and the indices of the tokens, and returns the tokens' outputs.
    """
    copies = {name: states[runs.slots] for name, states in of_slots.items()}
    output: Tensor | None = None
    for which, tokens in runs.rounds():
        own = {name: states[which] for name, states in copies.items()}
        mixed = step(own, tokens)
        if output is None:
            output = mixed.new_zeros(num_tokens, *mixed.shape[1:])
        output[tokens] = mixed
        for name, states in own.items():
            copies[name][which] = states
    for name, states in of_slots.items():
        states[runs.slots[runs.ended]] = copies[name][runs.ended]
    assert output is not None
    return output


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of the model's forward, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass
class LayerStates:
    """`cache.layers[i]` has states [batch, ...] by their index.

    They belong to the sequences that a mixer computes now.
    """

    conv_states: dict[int, Any] = field(default_factory=dict)  # The values are tensors or ConvStates.
    # The values are tensors or RecurrentStates.
    recurrent_states: dict[int, Any] = field(default_factory=dict)
    record_past = False

    def of_kind(self, kind: StateKind) -> dict[int, Any]:
        return self.conv_states if kind == "conv" else self.recurrent_states


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """A mixer computes these rows of the step as one sequence, [1, tokens, hidden]."""

    rows: Tensor  # The type is int64.
    slot: Tensor  # The shape is int64 [1].


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A mixer computes these rows token by token, [num_tokens, 1, hidden]."""

    rows: Tensor  # The type is int64.
    runs: TokenRuns


@dataclass(frozen=True, slots=True)
class TokenRounds:
    """A graph computes runs of tokens in a fixed number of rounds, each with one token of every run.

    Runs with fewer tokens compute some row again, and nothing reads that. Tables are int64, on the device.
    """

    slots: Tensor  # This is the slot of each state [num_runs].
    rows: Tensor  # These are the rows of each round [num_rounds, num_runs].
    places: Tensor  # Each row's output is this one of those of all rounds [num_rows].
    counts: Tensor  # The states are to include so many tokens of each run [num_runs], once that is known.


class StepCache:
    """The cache belongs to one step. mixers.py fills the states of `layers` before a mixer runs."""

    is_compileable = False

    slots: SlotPool | None = None  # This and the next five fields are set where the model has mixers.
    in_place = False
    scan_tokens: int | None = None  # With None a chunk is one scan.
    sequences: Sequence[SequenceRows] = ()
    tokens: TokenRows | None = None
    rounds: TokenRounds | None = None  # With these there are no other rows.

    def __init__(self, calls: Sequence[AttentionCall], positions: Tensor) -> None:
        self.waiting: list[Take] = []  # Each mixer adds a callback, where a run of its tokens waits.
        self.takes: list[Callable[[], object]] = []  # So it does where there are rounds.
        self.layers = _Layers()
        self.view: StepView | None = None  # The view knows this cache.
        self._calls = iter(calls)
        self._stored: int | None = None
        self.device, self._positions = positions.device, positions

    # Attention calls these methods.

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return the key and value for attention.

        Of a latent, these are the stored ones of all tokens that the step sees.
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
        """Return the offset that a row needs to become its position, int64 [total].

        Callers add an arange over the rows and get the positions (Llama 4's temperature, and definitions that
        create position_ids themselves).
        """
        return self._offsets

    get_query_offset = get_seq_length

    @cached_property
    def _offsets(self) -> Tensor:
        return self._positions - torch.arange(len(self._positions), device=self.device)

    # Mixers call these methods.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True: a sequence begins with a state of zeros, which gives the same result as no state."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # From transformers 5.21 on mixers call these methods; before, they read `layers` themselves.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx].conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx].recurrent_states[state_idx]

    def update_conv_state(self, inputs: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Store `inputs` [batch, channels, tokens], and return them after the state's previous inputs."""
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
