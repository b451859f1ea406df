"""What becomes of logits before chance has a word.

In this order: biases; repetition penalty over the whole history; frequency and presence penalty over the
generated ids; min_tokens; ids that would end a banned sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.paged.runner import Chunk


def is_adjusted(chunk: Chunk) -> bool:
    params = chunk.sampling
    return bool(params.logit_bias or params.bad_token_ids) or params.penalizes or _must_go_on(chunk)


def adjust(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """In place; `logits` are [len(chunks), vocab_size]."""
    for row, chunk in zip(logits, chunks, strict=True):
        if chunk.sampling.logit_bias:
            _bias(row, chunk)
        if chunk.sampling.penalizes:
            _penalize(row, chunk)
        if _must_go_on(chunk) and (ending := _ending(chunk, len(row))):
            row[ending] = -torch.inf
        if banned := chunk.banned_ids:
            row[list(banned)] = -torch.inf
    return logits


def _bias(logits: Tensor, chunk: Chunk) -> None:
    ids, biases = zip(*chunk.sampling.logit_bias, strict=True)
    logits[list(ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _penalize(logits: Tensor, chunk: Chunk) -> None:
    """One row, in place."""
    params = chunk.sampling
    history = np.asarray(chunk.history, np.int64)
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(history).to(logits.device)  # what occurs twice is written twice, the same
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.frequency_penalty or params.presence_penalty) and chunk.num_output_ids:
        counts = np.bincount(history[-chunk.num_output_ids :])
        output_ids = np.flatnonzero(counts)
        penalties = torch.from_numpy(params.frequency_penalty * counts[output_ids] + params.presence_penalty)
        logits[torch.from_numpy(output_ids).to(logits.device)] -= penalties.to(logits.device)


def _must_go_on(chunk: Chunk) -> bool:
    return chunk.num_output_ids < chunk.sampling.min_tokens


def _ending(chunk: Chunk, vocab_size: int) -> list[int]:
    """The ids that would end it; none where one of them must be chosen."""
    params = chunk.sampling
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else chunk.eos_token_ids)}
    ending = {token_id for token_id in ending if token_id < vocab_size}
    return sorted(ending) if len(ending) < vocab_size else []
