"""Sampling row by row in numpy, as it is defined: what the batched one must choose too."""

import numpy as np
from numpy.typing import NDArray

from services.engine.paged.model_runner import Chunk, Sampled
from services.engine.torch.sampling.torch_sampler import uniform
from services.values.request import TokenLogprobs

Floats = NDArray[np.float64]


def sample_row(logits: Floats, chunk: Chunk) -> Sampled:
    """`logits` are [vocab_size]."""
    adjusted = _adjust(logits.copy(), chunk)
    token_id = int(adjusted.argmax()) if chunk.sampling.greedy else _choose(adjusted, chunk)
    return Sampled(token_id, _logprobs(logits, token_id, chunk.sampling.logprobs))


def _must_go_on(chunk: Chunk) -> bool:
    return chunk.num_output_ids < chunk.sampling.min_tokens


def _logprobs(logits: Floats, token_id: int, num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    highest = logits.max()
    log_sum = highest + np.log(np.exp(logits - highest).sum())
    top = tuple((int(i), float(logits[i] - log_sum)) for i in _highest_ids(logits, num_top))
    return TokenLogprobs(token_id, float(logits[token_id] - log_sum), top)


def _highest_ids(values: Floats, count: int) -> NDArray[np.int64]:
    """Ids of the `count` highest values, highest first, the lower id first among equals."""
    return np.argsort(-values, kind="stable")[:count]


def _adjust(logits: Floats, chunk: Chunk) -> Floats:
    """Apply the penalties and min_tokens, in place."""
    params = chunk.sampling
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(chunk.history, np.int64))
        values = logits[seen]
        logits[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if (params.frequency_penalty or params.presence_penalty) and chunk.num_output_ids:
        output_ids, counts = np.unique(np.asarray(chunk.history[-chunk.num_output_ids :]), return_counts=True)
        logits[output_ids] -= params.frequency_penalty * counts + params.presence_penalty
    if _must_go_on(chunk):
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else chunk.eos_token_ids)}
        ending = {token_id for token_id in ending if token_id < len(logits)}
        if len(ending) < len(logits):  # else one of them must be chosen
            logits[list(ending)] = -np.inf
    return logits


def _choose(logits: Floats, chunk: Chunk) -> int:
    """Draw from what temperature, top_k, top_p and min_p leave; ids in ascending order."""
    params = chunk.sampling
    if not np.isfinite(logits.max()):  # the model has overflowed: no distribution to draw from
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / params.temperature)  # the highest has weight 1
    kept = np.arange(len(weights)) if not params.top_k else np.sort(_highest_ids(logits, params.top_k))
    if params.top_p < 1:
        kept = kept[_nucleus(weights[kept], params.top_p)]
    kept = kept[weights[kept] >= params.min_p]
    cumulative = weights[kept].cumsum()
    point = uniform(params.seed, len(chunk.history)) * cumulative[-1]
    # Ids of weight 0 add nothing to the sum, so "right" never stops at one; rounding may pass the last.
    return int(
        kept[min(int(np.searchsorted(cumulative, point, side="right")), _last_positive(weights[kept]))]
    )


def _last_positive(weights: Floats) -> int:
    return int(np.flatnonzero(weights)[-1])


def _nucleus(weights: Floats, top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest highest weights that hold `top_p` of the sum, at least one."""
    ranked = np.argsort(-weights, kind="stable")
    before = np.concatenate(([0.0], weights[ranked].cumsum()[:-1]))
    return np.sort(ranked[before < top_p * weights.sum()])
