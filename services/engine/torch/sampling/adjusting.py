"""This module adjusts logits before a token is drawn.

The order is: biases; repetition penalty over the whole history; frequency and presence penalty over the
generated ids; min_tokens; ids that would end a banned sequence. Each step is computed for all rows at once:
on a GPU a call for each row would take longer than its computation.

`adjust_on_device` does the same on a GPU, with one copy to the device and few launches: biases, ids of the
history, the generated ones among them, forbidden ids, and penalties of rows go into one packed tensor, which
some twenty kernels of torch use.

Each id of a sequence is converted once, not at each of its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.model_runner import Chunk
from services.engine.torch.draft_tokens import DraftedHistory
from services.values.request import SamplingParams

_Ids = NDArray[np.int64]
_PerRow = Sequence[tuple[int, _Ids]]  # This is rows of logits with some ids of each.


def is_adjusted(chunk: Chunk) -> bool:
    return always_adjusts(chunk.sampling) or must_go_on(chunk)


def always_adjusts(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.bad_token_ids) or params.penalizes


def adjust(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Adjust `logits` [len(chunks), vocab_size], contiguous, in place."""
    _bias(logits, chunks)
    _penalize_repetition(logits, chunks)
    _penalize_frequency(logits, chunks)
    _forbid(logits, chunks)
    return logits


def biases_of(chunks: Sequence[Chunk]) -> list[tuple[int, _Ids, list[float]]]:
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
    # An id that occurs twice is written twice with the same value.
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
    return [
        (row, np.array(sorted(ids), np.int64))
        for row, chunk in enumerate(chunks)
        if (ids := {*_ending(chunk, vocab_size), *chunk.banned_ids})
    ]


def _forbid(logits: Tensor, chunks: Sequence[Chunk]) -> None:
    if forbidden := forbidden_of(chunks, logits.shape[1]):
        logits.view(-1)[_places(logits, forbidden)] = -torch.inf


def _ids(ids: Iterable[int], count: int) -> _Ids:
    return np.fromiter(ids, np.int64, count)  # It takes half of np.array's time.


def _places(logits: Tensor, per_row: _PerRow) -> Tensor:
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


def must_go_on(chunk: Chunk) -> bool:
    return chunk.num_output_ids < chunk.sampling.min_tokens


def _ending(chunk: Chunk, vocab_size: int) -> Iterable[int]:
    """Return the ids that would end it too early; none where one of them must be chosen."""
    params = chunk.sampling
    if not must_go_on(chunk):
        return ()
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else chunk.eos_token_ids)}
    ending = {token_id for token_id in ending if token_id < vocab_size}
    return ending if len(ending) < vocab_size else ()


_IdsOfRows = list[tuple[int, _Ids]]  # This is rows of logits with some ids of each.

# So many recent histories, and ids in them, are cached, and as many older ones. Nobody reports which
# sequences have ended.
_MOST_KNOWN, _MOST_IDS = 256, 1 << 20


@dataclass(slots=True)
class _Known:
    history: list[int]
    ids: _Ids
    count: int


class Histories:
    """This caches each history as an array.

    A sequence's list of ids only ever grows, so each id is read once.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._recent, self._older = dict[int, _Known](), dict[int, _Known]()
        self._num_ids = 0  # This counts the recent histories' ids.

    def ids_of(self, history: Sequence[int]) -> _Ids:
        """Return the history's ids.

        Raises IndexError for an id beyond the vocabulary.
        """
        if isinstance(history, DraftedHistory):
            drafts = require_ids(np.array(history.drafts, np.int64), self._vocab_size)
            return np.concatenate((self.ids_of(history.ids), drafts))
        if not isinstance(history, list):
            return require_ids(np.fromiter(history, np.int64, len(history)), self._vocab_size)
        known = self._known(history)
        if known.count < (length := len(history)):
            if length > len(known.ids):
                ids = np.empty(2 * length, np.int64)
                ids[: known.count] = known.ids[: known.count]
                known.ids = ids
            new = history[known.count :]
            if min(new) < 0 or max(new) >= self._vocab_size:
                raise IndexError(f"ids from {min(new)} to {max(new)}, of a vocabulary of {self._vocab_size}")
            known.ids[known.count : length] = new
            self._num_ids += length - known.count
            known.count = length
        return known.ids[: known.count]

    def _known(self, history: list[int]) -> _Known:
        key = id(history)
        known = self._recent.get(key) or self._older.get(key)
        if known is None or known.history is not history or not _goes_on(known):
            known = _Known(history, np.empty(0, np.int64), 0)
        if self._recent.get(key) is not known:
            if len(self._recent) >= _MOST_KNOWN or self._num_ids + len(history) > _MOST_IDS:
                self._recent, self._older, self._num_ids = {}, self._recent, 0
            self._recent[key] = known
            self._num_ids += known.count
        return known


def _goes_on(known: _Known) -> bool:
    last = known.count - 1
    return len(known.history) > last and (last < 0 or known.history[last] == known.ids[last])


def adjust_on_device(logits: Tensor, chunks: Sequence[Chunk], histories: Histories) -> Tensor:
    """Adjust `logits` float64 [len(chunks), vocab_size], contiguous, in place.

    Raises IndexError for an id beyond the vocabulary.
    """
    biases, forbidden = biases_of(chunks), forbidden_of(chunks, logits.shape[1])
    biased_ids = [(row, ids) for row, ids, _ in biases]
    for _, ids in (*biased_ids, *forbidden):
        require_ids(ids, logits.shape[1])
    penalized, generated = _penalized(chunks, histories)
    lists = (biased_ids, penalized, generated, forbidden)
    counts = [sum(len(ids) for _, ids in per_row) for per_row in lists]
    packed = torch.empty(
        sum(counts) + counts[0] + 3 * len(chunks), dtype=torch.int64, pin_memory=logits.is_cuda
    )
    numbers, end = packed.numpy(), 0
    for per_row in lists:
        end = _pack(numbers, end, per_row, logits.shape[1])
    floats = numbers.view(np.float64)[end:]
    for _, _, values in biases:
        floats[: len(values)] = values
        floats = floats[len(values) :]
    floats[:] = np.array([_penalties(chunk) for chunk in chunks]).ravel()
    sizes = [*counts, counts[0], 3 * len(chunks)]
    biased, at, at_generated, barred, *of_floats = packed.to(logits.device, non_blocking=True).split(sizes)
    added, penalties = (each.view(torch.float64) for each in of_floats)
    flat = logits.view(-1)
    if len(biased):
        flat.index_add_(0, biased, added)
    if len(at):
        rows = penalties.view(-1, 3)[at.div(logits.shape[1], rounding_mode="floor")]
        _penalize(flat, at, at_generated, rows)
    if len(barred):
        flat.index_fill_(0, barred, -torch.inf)
    return logits


def _penalized(chunks: Sequence[Chunk], histories: Histories) -> tuple[_IdsOfRows, _IdsOfRows]:
    """Return the ids that penalties apply to, and the generated ids where penalties count them."""
    penalized, generated = _IdsOfRows(), _IdsOfRows()
    for row, chunk in enumerate(chunks):
        params = chunk.sampling
        count = chunk.num_output_ids if params.frequency_penalty or params.presence_penalty else 0
        if count or params.repetition_penalty != 1:
            ids = histories.ids_of(chunk.history)
            own = ids[len(ids) - count :]
            penalized.append((row, own if params.repetition_penalty == 1 else ids))
            if count:
                generated.append((row, own))
    return penalized, generated


def _penalties(chunk: Chunk) -> tuple[float, float, float]:
    params = chunk.sampling
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _pack(numbers: _Ids, start: int, per_row: _IdsOfRows, vocab_size: int) -> int:
    """Write the indices of these ids in the flat logits, and return the end of what was written."""
    for row, ids in per_row:
        end = start + len(ids)
        np.add(ids, row * vocab_size, out=numbers[start:end])
        start = end
    return start


def _penalize(flat: Tensor, at: Tensor, at_generated: Tensor, penalties: Tensor) -> None:
    """Apply their rows' penalties for repetition, frequency and presence to the logits at `at`.

    An index that occurs twice is written twice with the same value.
    """
    repetition, frequency, presence = penalties.unbind(1)
    values = flat[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    if len(at_generated):
        counts = torch.zeros(len(flat), dtype=torch.int32, device=flat.device)
        counts.index_add_(0, at_generated, counts.new_ones(len(at_generated)))
        times = counts[at]
        values -= frequency * times + presence * (times > 0)
    flat[at] = values
