"""Recurrent layers compute a packed step: prompts sequence by sequence, and all single tokens together.

A mixer of transformers takes [batch, tokens, hidden] and one state per row of the batch; it does not support
packed rows (its torch fallbacks ignore cu_seq_lens). So its `forward` is wrapped: each scan of several tokens
becomes [1, n, hidden], and all tokens that are computed one by one become [m, 1, hidden] (step_cache.py). On
a CPU a chunk is cut into scans at fixed positions of its sequence (services/kv/checkpoints.py), so that its
bits depend on the sequence alone.

If each token of the batch has a state of its own, states are gathered from their slots and scattered again.
If the function that takes the states is known, it gets them in place, in one call, drafts included
(recurrence.py). Otherwise states are gathered round by round: one call computes the first tokens, the next
the second tokens, and so on, and accepted drafts are computed again. In a graph it is always so, with a fixed
number of rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.engine.paged.model_runner import Chunk
from services.engine.torch.device import send
from services.engine.torch.model.activations import EvenFunctions
from services.engine.torch.model.kv_groups import Mixer, StateName
from services.engine.torch.model.step_cache import (
    ConvStates,
    RecurrentStates,
    SequenceRows,
    StepCache,
    TokenRounds,
    TokenRows,
    TokenRuns,
    by_rounds,
)
from services.engine.torch.pools import SlotPool
from services.kv.checkpoints import scans
from services.values.errors import ConfigError, ProtocolError


def wrap(mixer: Mixer, in_place: Callable[..., Any] | None = None) -> None:
    """Make the module use slots whenever its arguments include a StepCache.

    `in_place` is its forward for single tokens that takes states in place.
    """
    original: Callable[..., Any] = mixer.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, StepCache)), None)
        if cache is None:
            return original(*args, **kwargs)
        assert cache.slots is not None
        hidden, args, kwargs = _split(args, kwargs)
        call = _Call(mixer, original, in_place if cache.in_place else None, cache, cache.slots, args, kwargs)
        return call.compute(hidden[0])[None]

    mixer.module.forward = forward


@dataclass(frozen=True, slots=True)
class _Call:
    mixer: Mixer
    original: Callable[..., Any]
    in_place: Callable[..., Any] | None
    cache: StepCache
    pool: SlotPool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compute(self, hidden: Tensor) -> Tensor:
        if self.cache.rounds is not None:
            return self._in_rounds(hidden, self.cache.rounds)
        mixed = [(each.rows, self._sequence(hidden[each.rows], each.slot)) for each in self.cache.sequences]
        tokens = self.cache.tokens
        if tokens is not None:
            mixed.append((tokens.rows, self._tokens(hidden[tokens.rows, None], tokens.runs)))
        output = mixed[0][1].new_empty(len(hidden), mixed[0][1].shape[-1])
        for rows, of_rows in mixed:
            output[rows] = of_rows
        return output

    def _sequence(self, hidden: Tensor, slot: Tensor) -> Tensor:
        states = {name: self.pool.of_state[name][slot] for name in self.mixer.states}
        with _scanning(self.mixer.module, self.cache.scan_tokens):
            mixed = self._run(self.original, hidden[None], states)
        _scatter(self.pool, slot, states)
        return mixed

    def _tokens(self, hidden: Tensor, runs: TokenRuns) -> Tensor:
        if self.in_place is None and not runs.are_plain:
            return self._by_rounds(hidden, runs)
        states = {name: self._of_tokens(name, runs) for name in self.mixer.states}
        mixed = self._run(self.in_place or self.original, hidden, states)
        _scatter(self.pool, runs.slots, states)
        return mixed

    def _of_tokens(self, name: StateName, runs: TokenRuns) -> Any:
        of_slots, is_conv = self.pool.of_state[name], name[1] == "conv"
        if self.in_place is None or (is_conv and runs.are_plain):
            return of_slots[runs.slots]
        return (ConvStates if is_conv else RecurrentStates)(of_slots, runs, self.cache.waiting)

    def _by_rounds(self, hidden: Tensor, runs: TokenRuns) -> Tensor:
        def step(states: dict[StateName, Tensor], tokens: Tensor) -> Tensor:
            return self._run(self.original, hidden[tokens], states)

        if runs.some_wait:
            self.cache.waiting.append(lambda kept: self._by_rounds(hidden, kept))
        of_slots = {name: self.pool.of_state[name] for name in self.mixer.states}
        return by_rounds(of_slots, runs, len(hidden), step)

    def _in_rounds(self, hidden: Tensor, rounds: TokenRounds) -> Tensor:
        states: dict[StateName, Any] = {
            name: self.pool.of_state[name][rounds.slots] for name in self.mixer.states
        }
        mixed = [self._run(self.original, hidden[rows, None], states) for rows in rounds.rows.unbind()]
        self.cache.takes.append(lambda: self._take(hidden, rounds))
        return torch.cat(mixed)[rounds.places]

    def _take(self, hidden: Tensor, rounds: TokenRounds) -> None:
        """Compute the rounds again, and store the states after the first tokens of each run."""
        states: dict[StateName, Any] = {
            name: self.pool.of_state[name][rounds.slots] for name in self.mixer.states
        }
        for nth, rows in enumerate(rounds.rows.unbind()):
            after = {name: each.clone() for name, each in states.items()}
            self._run(self.original, hidden[rows, None], after)
            goes_on = rounds.counts > nth
            for name, each in states.items():
                states[name] = torch.where(goes_on.view(-1, *[1] * (each.dim() - 1)), after[name], each)
        _scatter(self.pool, rounds.slots, states)

    def _run(self, compute: Callable[..., Any], hidden: Tensor, states: dict[StateName, Any]) -> Tensor:
        """Compute `hidden` [batch, tokens, hidden], return [batch * tokens, hidden], and update `states`."""
        for name, each in states.items():
            layer_idx, kind, index = name
            self.cache.layers[layer_idx].of_kind(kind)[index] = each
        mixed = compute(hidden, *self.args, **self.kwargs)
        if not isinstance(mixed, Tensor):
            raise ConfigError(f"a recurrent layer gives {type(mixed).__name__}, not a tensor")
        for name in states:
            layer_idx, kind, index = name
            states[name] = self.cache.layers[layer_idx].of_kind(kind)[index]
        return mixed.flatten(0, 1)


@contextmanager
def _scanning(module: nn.Module, scan_tokens: int | None) -> Iterator[None]:
    """Keep every number independent of how many tokens of a scan follow it.

    Mamba-2 pads a scan to its `chunk_size`, 128 or 256; this lowers it to `scan_tokens`. None leaves it as it
    is.
    """
    if scan_tokens is None:
        yield
        return
    own = getattr(module, "chunk_size", None)
    shorter = isinstance(own, int) and own > scan_tokens
    if shorter:
        module.chunk_size = scan_tokens
    try:
        with EvenFunctions():
            yield
    finally:
        if shorter:
            module.chunk_size = own


def require_slots(slots: Sequence[int | None], num_slots: int) -> None:
    """Raise ProtocolError where a slot is missing, is not in the pool, or occurs twice."""
    if len(set(slots)) < len(slots) or any(slot is None or not 0 <= slot < num_slots for slot in slots):
        raise ProtocolError(f"chunks need slots of their own among {num_slots}, and have {slots}")


def place_rows(
    cache: StepCache, chunks: Sequence[Chunk], num_slots: int, scan_tokens: int | None = None
) -> None:
    """Put into the cache how mixers compute the step's rows.

    Generated tokens, drafts and single tokens are computed one by one, the rest in scans of up to
    `scan_tokens`. With None each chunk is one scan.

    Raises ProtocolError where a chunk has no slot, or two have the same.
    """
    require_slots([chunk.slot for chunk in chunks], num_slots)
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    parts = [
        each for end, chunk in zip(ends, chunks, strict=True) for each in _parts(end, chunk, scan_tokens)
    ]
    cache.scan_tokens = scan_tokens
    cache.sequences = tuple(
        SequenceRows(_ids(rows, cache), _ids([chunk.slot], cache))
        for rows, chunk, singly in parts
        if not singly
    )
    if tokens := [(rows, chunk) for rows, chunk, singly in parts if singly]:
        cache.tokens = _token_rows(tokens, cache)


def _parts(end: int, chunk: Chunk, scan_tokens: int | None) -> Iterator[tuple[range, Chunk, bool]]:
    """Yield the chunk's rows in order, and whether they are computed one by one; `end` follows the last row.

    A single token left over at the end is computed by itself: scans run first, so its state is ready by then.
    A single token before the first border is scanned together with the tokens after it.
    """
    to_rows = end - chunk.end
    if chunk.num_drafts or scan_tokens == 1 or (chunk.generated and scan_tokens is not None):
        yield range(end - len(chunk.token_ids), end), chunk, True
        return
    parts = list(scans(chunk.start, chunk.end, scan_tokens or chunk.end))
    if len(parts) > 1 and len(parts[0]) == 1:
        parts[:2] = [range(parts[0].start, parts[1].stop)]
    for scan in parts:
        yield range(scan.start + to_rows, scan.stop + to_rows), chunk, len(scan) == 1


def _token_rows(tokens: Sequence[tuple[range, Chunk]], cache: StepCache) -> TokenRows:
    counts = np.array([len(own) for own, _ in tokens])
    runs = TokenRuns(
        slots=_ids([chunk.slot for _, chunk in tokens], cache),
        firsts=np.cumsum(counts) - counts,
        counts=counts,
        waits=np.array([chunk.num_drafts > 0 for _, chunk in tokens]),
    )
    return TokenRows(_ids([row for own, _ in tokens for row in own], cache), runs)


def _ids(ids: Sequence[int | None], cache: StepCache) -> Tensor:
    (sent,) = send([np.array(ids, np.int64)], cache.device)
    return sent


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    kwargs = {name: value for name, value in kwargs.items() if name != "paged"}
    if "hidden_states" in kwargs:
        return kwargs.pop("hidden_states"), args, kwargs
    return args[0], args[1:], kwargs


def _scatter(pool: SlotPool, slots: Tensor, states: dict[StateName, Any]) -> None:
    for name, each in states.items():
        if isinstance(each, Tensor):
            pool.of_state[name][slots] = each
