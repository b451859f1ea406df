"""Recurrent layers of a packed step: sequence by sequence, and all single tokens together.

A mixer of transformers takes [batch, tokens, hidden] and one state a row of the batch; it knows nothing of
packed rows (its torch fallbacks ignore cu_seq_lens). So its `forward` is wrapped: each run of several tokens
goes in as [1, n, hidden], all single tokens of the step as [m, 1, hidden]. Before that states are gathered
from their slots, after it scattered, whether it writes them in place or by the cache's update calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from services.engine.paged.runner import Chunk
from services.engine.torch.model.remembered import Mixer
from services.engine.torch.model.slots import CopiedStates, States, StatesInPlace
from services.engine.torch.model.step_cache import DraftRows, SequenceRows, StepCache
from services.values.errors import ConfigError, ProtocolError


def wrap(mixer: Mixer, in_place: Callable[..., Any] | None = None) -> None:
    """Let the module run over slots wherever it is given a StepCache, from now on.

    `in_place` is its forward for single tokens whose recurrent states are StatesInPlace.
    """
    original: Callable[..., Any] = mixer.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, StepCache)), None)
        if cache is None:
            return original(*args, **kwargs)
        hidden, args, kwargs = _split(args, kwargs)
        call = _Call(mixer, original, in_place if cache.in_place else None, cache, args, kwargs)
        return call.compute(hidden[0])[None]

    mixer.module.forward = forward


@dataclass(frozen=True, slots=True)
class _Call:
    """Of a mixer, in a step."""

    mixer: Mixer
    original: Callable[..., Any]
    in_place: Callable[..., Any] | None
    cache: StepCache
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compute(self, hidden: Tensor) -> Tensor:
        """`hidden` are [total, hidden]."""
        assert self.cache.slots is not None
        rows = [(part.rows, self._part(hidden, part, self.cache.slots)) for part in self.cache.parts]
        if self.cache.drafts is not None:
            rows += self._drafted(hidden, self.cache.drafts)
        output = rows[0][1].new_empty(len(hidden), rows[0][1].shape[-1])
        for of_part, mixed in rows:
            output[of_part] = mixed
        return output

    def _drafted(self, hidden: Tensor, drafts: DraftRows) -> list[tuple[Tensor, Tensor]]:
        """As if all drafts were right, on copies of the states: rows, and what they become."""
        assert self.cache.slots is not None
        copies = CopiedStates(self.cache.slots, self.mixer.states, drafts.slots)
        self.cache.recomputed.append(partial(self._recompute, hidden, drafts))
        parts = [SequenceRows(rows, torch.arange(len(rows), device=rows.device)) for rows in drafts.rounds]
        return [(part.rows, self._part(hidden, part, copies)) for part in parts]

    def _recompute(self, hidden: Tensor, drafts: DraftRows, counts: Sequence[int]) -> None:
        """Let the states take in the first tokens of each chunk, as plain decoding would have."""
        assert self.cache.slots is not None
        for part in drafts.first(counts):
            self._part(hidden, part, self.cache.slots)

    def _part(self, hidden: Tensor, part: SequenceRows, states: States) -> Tensor:
        of_part = hidden[part.rows].view(len(part.slots), -1, hidden.shape[-1])
        in_place = self.in_place if part.are_singles else None
        _gather(self.mixer, part, self.cache, states, in_place=in_place is not None)
        mixed = _tensor((in_place or self.original)(of_part, *self.args, **self.kwargs))
        _scatter(self.mixer, part, self.cache, states)
        return mixed.flatten(0, 1)


def sequence_rows(
    chunks: Sequence[Chunk], num_slots: int, device: torch.device, one_by_one: int = 1
) -> tuple[SequenceRows, ...]:
    """The parts of a step, to be computed in order; chunks of up to `one_by_one` tokens as single ones.

    Chunks with drafts are in none of them: see draft_rows.

    Raises ProtocolError where a chunk has no slot, or two have one.
    """
    slots = [chunk.slot for chunk in chunks]
    if len(set(slots)) < len(slots) or any(slot is None or not 0 <= slot < num_slots for slot in slots):
        raise ProtocolError(f"chunks need slots of their own among {num_slots}, and have {slots}")
    parts, singles, end = [], [], 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if chunk.num_drafts:
            continue
        if end - start == 1:
            singles.append((start, chunk.slot))
        elif end - start <= one_by_one:
            parts += [_part([row], [chunk.slot], device) for row in range(start, end)]
        else:
            parts.append(_part(range(start, end), [chunk.slot], device))
    if singles:
        rows, of_singles = zip(*singles, strict=True)
        parts.append(_part(rows, of_singles, device))
    return tuple(parts)


def draft_rows(chunks: Sequence[Chunk], device: torch.device) -> DraftRows | None:
    """Of those with drafts, where there are any."""
    drafted = sorted(
        (i for i, chunk in enumerate(chunks) if chunk.num_drafts), key=lambda i: -chunks[i].num_drafts
    )
    if not drafted:
        return None
    offsets = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
    rounds = [
        torch.tensor([offsets[i] + nth for i in drafted if chunks[i].num_drafts >= nth], device=device)
        for nth in range(chunks[drafted[0]].num_drafts + 1)
    ]
    slots = [slot for i in drafted if (slot := chunks[i].slot) is not None]
    return DraftRows(drafted, slots, rounds)


def _part(rows: Sequence[int], slots: Sequence[int | None], device: torch.device) -> SequenceRows:
    return SequenceRows(torch.tensor(rows, device=device), torch.tensor(slots, device=device))


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Hidden states, [1, total, hidden], and the other arguments but for ours."""
    kwargs = {name: value for name, value in kwargs.items() if name != "paged"}
    if "hidden_states" in kwargs:
        return kwargs.pop("hidden_states"), args, kwargs
    return args[0], args[1:], kwargs


def _tensor(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ConfigError(f"a recurrent layer gives {type(output).__name__}, not a tensor")
    return output


def _gather(mixer: Mixer, part: SequenceRows, cache: StepCache, states: States, *, in_place: bool) -> None:
    for name in mixer.states:
        layer_idx, kind, index = name
        where = states.in_place(name, part.slots) if in_place and kind == "recurrent" else None
        of_part = states.of_state[name][part.slots] if where is None else where
        cache.layers[layer_idx].of_kind(kind)[index] = of_part


def _scatter(mixer: Mixer, part: SequenceRows, cache: StepCache, states: States) -> None:
    for name in mixer.states:
        layer_idx, kind, index = name
        of_part = cache.layers[layer_idx].of_kind(kind)[index]
        if not isinstance(of_part, StatesInPlace):
            states.of_state[name][part.slots] = of_part
