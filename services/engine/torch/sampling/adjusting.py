"""Logits are adjusted before chance has a word.

This is the order: biases; repetition penalty over the whole history; frequency and presence penalty over the
generated ids; min_tokens; ids that would end a banned sequence. Each is done for all rows at once: on a GPU a
call for each row takes longer than what it computes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.model_runner import Chunk

_Ids = NDArray[np.int64]
_PerRow = Sequence[tuple[int, _Ids]]  # rows of logits, and some ids of each


def is_adjusted(chunk: Chunk) -> bool:
    params = chunk.sampling
    return bool(params.logit_bias or params.bad_token_ids) or params.penalizes or _must_go_on(chunk)


def adjust(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Adjust `logits` [len(chunks), vocab_size], contiguous, in place."""
    _bias(logits, chunks)
    _penalize_repetition(logits, chunks)
    _penalize_frequency(logits, chunks)
    _forbid(logits, chunks)
    return logits


def biases_of(chunks: Sequence[Chunk]) -> list[tuple[int, _Ids, list[float]]]:
    """Return rows that have some, their ids and what is added to each of these."""
    of_rows = {row: dict(c.sampling.logit_bias) for row, c in enumerate(chunks) if c.sampling.logit_bias}
    return [(row, _ids(biases, len(biases)), list(biases.values())) for row, biases in of_rows.items()]


def _bias(logits: Tensor, chunks: Sequence[Chunk]) -> None:
    if of_rows := biases_of(chunks):
        at = _places(logits, [(row, ids) for row, ids, _ in of_rows])
        logits.view(-1)[at] += _like(logits, [bias for _, _, biases in of_rows for bias in biases])


def _penalize_repetition(logits: Tensor, chunks: Sequence[Chunk]) -> None:
    seen = [
        (row, _ids(chunk.history, len(chunk.history)))
        for row, chunk in enumerate(chunks)
        if chunk.sampling.repetition_penalty != 1
    ]
    if not seen:
        return
    at = _places(logits, seen)
    counts = [len(ids) for _, ids in seen]
    penalties = _like(logits, np.repeat([chunks[row].sampling.repetition_penalty for row, _ in seen], counts))
    values = logits.view(-1)[at]
    # An id that occurs twice is written twice, the same.
    logits.view(-1)[at] = torch.where(values > 0, values / penalties, values * penalties)


def _penalize_frequency(logits: Tensor, chunks: Sequence[Chunk]) -> None:
    generated: list[tuple[int, _Ids]] = []
    penalties: list[NDArray[Any]] = []
    for row, chunk in enumerate(chunks):
        params, count = chunk.sampling, chunk.num_output_ids
        if (params.frequency_penalty or params.presence_penalty) and count:
            ids, counts = np.unique(_ids(chunk.history[-count:], count), return_counts=True)
            generated.append((row, ids))
            penalties.append(params.frequency_penalty * counts + params.presence_penalty)
    if generated:
        logits.view(-1)[_places(logits, generated)] -= _like(logits, np.concatenate(penalties))


def forbidden_of(chunks: Sequence[Chunk], vocab_size: int) -> list[tuple[int, _Ids]]:
    """Return rows that have some, and the ids that must not come next."""
    return [
        (row, np.array(sorted(ids), np.int64))
        for row, chunk in enumerate(chunks)
        if (ids := {*_ending(chunk, vocab_size), *chunk.banned_ids})
    ]


def _forbid(logits: Tensor, chunks: Sequence[Chunk]) -> None:
    if forbidden := forbidden_of(chunks, logits.shape[1]):
        logits.view(-1)[_places(logits, forbidden)] = -torch.inf


def _ids(ids: Iterable[int], count: int) -> _Ids:
    return np.fromiter(ids, np.int64, count)  # it takes half of np.array's time


def _places(logits: Tensor, per_row: _PerRow) -> Tensor:
    """Return where these are in all of `logits`, on its device.

    Raises IndexError for an id that no row has.
    """
    vocab_size = logits.shape[1]
    ids = require_ids(np.concatenate([ids for _, ids in per_row]), vocab_size)
    starts = np.repeat([row * vocab_size for row, _ in per_row], [len(ids) for _, ids in per_row])
    return torch.from_numpy(ids + starts).to(logits.device)


def require_ids(ids: _Ids, vocab_size: int) -> _Ids:
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise IndexError(f"ids from {ids.min()} to {ids.max()}, of a vocabulary of {vocab_size}")
    return ids


def _like(logits: Tensor, values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=logits.dtype).to(logits.device)


def _must_go_on(chunk: Chunk) -> bool:
    return chunk.num_output_ids < chunk.sampling.min_tokens


def _ending(chunk: Chunk, vocab_size: int) -> Iterable[int]:
    """Return the ids that would end it too early; none where one of them must be chosen."""
    params = chunk.sampling
    if not _must_go_on(chunk):
        return ()
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else chunk.eos_token_ids)}
    ending = {token_id for token_id in ending if token_id < vocab_size}
    return ending if len(ending) < vocab_size else ()
