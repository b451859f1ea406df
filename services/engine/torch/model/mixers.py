"""Recurrent layers of a packed step: sequence by sequence, and all single tokens together.

A mixer of transformers takes [batch, tokens, hidden] and one state a row of the batch; it knows nothing of
packed rows (its torch fallbacks ignore cu_seq_lens). So its `forward` is wrapped: each run of several tokens
goes in as [1, n, hidden], all single tokens of the step as [m, 1, hidden]. Before that states are gathered
from their slots, after it scattered, whether it writes them in place or by the cache's update calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from services.engine.paged.runner import Chunk
from services.engine.torch.model.remembered import Mixer
from services.engine.torch.model.slots import StatesInPlace
from services.engine.torch.model.step_cache import SequenceRows, StepCache
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
        output = None
        for part in cache.parts:
            of_part = hidden[0, part.rows].view(len(part.slots), -1, hidden.shape[-1])
            compute = in_place if cache.in_place and part.are_singles else None
            _gather(mixer, part, cache, in_place=compute is not None)
            mixed = _tensor((compute or original)(of_part, *args, **kwargs))
            _scatter(mixer, part, cache)
            if output is None:
                output = mixed.new_empty(1, hidden.shape[1], mixed.shape[-1])
            output[0, part.rows] = mixed.flatten(0, 1)
        return output

    mixer.module.forward = forward


def sequence_rows(
    chunks: Sequence[Chunk], num_slots: int, device: torch.device, one_by_one: int = 1
) -> tuple[SequenceRows, ...]:
    """The parts of a step, to be computed in order; chunks of up to `one_by_one` tokens as single ones.

    Raises ProtocolError where a chunk has no slot, or two have one.
    """
    slots = [chunk.slot for chunk in chunks]
    if len(set(slots)) < len(slots) or any(slot is None or not 0 <= slot < num_slots for slot in slots):
        raise ProtocolError(f"chunks need slots of their own among {num_slots}, and have {slots}")
    parts, singles, end = [], [], 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
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


def _gather(mixer: Mixer, part: SequenceRows, cache: StepCache, *, in_place: bool) -> None:
    assert cache.slots is not None
    for name in mixer.states:
        layer_idx, kind, index = name
        where = cache.slots.in_place(name, part.slots) if in_place and kind == "recurrent" else None
        states = cache.slots.of_state[name][part.slots] if where is None else where
        cache.layers[layer_idx].of_kind(kind)[index] = states


def _scatter(mixer: Mixer, part: SequenceRows, cache: StepCache) -> None:
    assert cache.slots is not None
    for name in mixer.states:
        layer_idx, kind, index = name
        states = cache.layers[layer_idx].of_kind(kind)[index]
        if not isinstance(states, StatesInPlace):
            cache.slots.of_state[name][part.slots] = states
