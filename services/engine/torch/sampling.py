"""Choosing tokens from logits.

In this order: logprobs of the raw logits; repetition penalty over the whole history; frequency and
presence penalty over the generated ids; min_tokens; temperature; top_k; top_p; min_p; choice.

Chance is a pure function of (seed, position), so that a sequence that is retracted, moved or
replayed goes on with the same tokens, whoever shares its batch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.engine.paged.runner import Chunk, Sampled
from services.request import SamplingParams, TokenLogprobs

Floats = NDArray[np.float64]

_MASK64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def sample(logits: Tensor, chunks: Sequence[Chunk]) -> list[Sampled]:
    """Choose one token for each row of `logits` ([len(chunks), vocab_size], any dtype and device).

    Each result depends on its own row and chunk only. Equal logits: the lowest id comes first.
    """
    plain = [_takes_the_highest(chunk) for chunk in chunks]
    highest: list[int] = logits.argmax(dim=-1).tolist() if any(plain) else []
    rest = [row for row, is_plain in enumerate(plain) if not is_plain]
    rows = iter(logits[rest].double().cpu().numpy() if rest else ())
    return [
        Sampled(highest[row]) if is_plain else _sample_row(next(rows), chunks[row])
        for row, is_plain in enumerate(plain)
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a stream for each seed."""
    return (_mix(_mix(seed) + (position + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _takes_the_highest(chunk: Chunk) -> bool:
    params = chunk.sampling
    return params.greedy and params.logprobs is None and not _is_penalized(params) and not _must_go_on(chunk)


def _is_penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)


def _must_go_on(chunk: Chunk) -> bool:
    return chunk.num_output_ids < chunk.sampling.min_tokens


def _sample_row(logits: Floats, chunk: Chunk) -> Sampled:
    adjusted = _adjust(logits.copy(), chunk)
    token_id = int(adjusted.argmax()) if chunk.sampling.greedy else _choose(adjusted, chunk)
    return Sampled(token_id, _logprobs(logits, token_id, chunk.sampling.logprobs))


def _logprobs(logits: Floats, token_id: int, num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    highest = logits.max()
    log_sum = highest + np.log(np.exp(logits - highest).sum())
    top = tuple((int(i), float(logits[i] - log_sum)) for i in _highest_ids(logits, num_top))
    return TokenLogprobs(token_id, float(logits[token_id] - log_sum), top)


def _highest_ids(values: Floats, count: int) -> NDArray[np.int64]:
    """Ids of the `count` highest values, highest first, the lower id first among equals."""
    if count == 0:
        return np.empty(0, np.int64)
    count = min(count, len(values))
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


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
    total = weights.sum()
    # Weights below this hold together less than 1 - top_p, so none of them is needed; sorts far fewer.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
    before = np.concatenate(([0.0], weights[ranked].cumsum()[:-1]))
    return np.sort(ranked[before < top_p * total])
