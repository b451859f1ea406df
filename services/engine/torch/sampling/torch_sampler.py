"""This module chooses tokens from logits.

The order is: logprobs of the raw logits; the adjustments of adjusting.py; the constraint's mask; temperature;
top_k; top_p; min_p; choice.

The random number is a pure function of (seed, position), so that a sequence that is retracted, moved or
replayed continues with the same tokens, whatever else is in its batch.

torch does the work over the whole vocabulary on the logits' device, for a block of rows at once. For rows
with top_k or top_p, and for logprobs, only the few ids that may be among the highest are copied to the host.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, tensor

from services.engine.paged.model_runner import NO_TOKEN, Chunk, Sampled
from services.engine.torch.sampling.adjusting import adjust, is_adjusted
from services.engine.torch.sampling.step_masks import NO_MASKS, RowMasks
from services.values.request import SamplingParams, TokenLogprobs

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_STRIPES = 64  # See floors.


def floors(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return for each row a value that at least counts[row] values reach, and few more: [num_rows, 1].

    Each row is cut into stripes, and the highest values of that many stripes are at least as high.
    """
    width, most = values.shape[1] // _STRIPES, max(1, *counts)
    if width < most:
        return values.new_full((len(values), 1), -float("inf"))
    highest_of = values[:, : _STRIPES * width].unflatten(1, (_STRIPES, width)).amax(1).topk(most).values
    which = tensor([max(1, count) - 1 for count in counts], device=values.device)
    return highest_of.gather(1, which[:, None])


def at_least(floors: Tensor, values: Tensor) -> list[tuple[Ids, Floats]]:
    """Return for each row the ids, ascending, whose value is not below the floor, and these values."""
    num_rows, vocab_size = values.shape
    if values.device.type == "cpu":  # numpy takes a fourth of torch's time.
        hits = np.flatnonzero(values.numpy() >= floors.numpy())
        high = values.numpy().ravel()[hits]
    else:
        on_device = (values >= floors).flatten().nonzero()[:, 0]
        hits, high = on_device.cpu().numpy(), values.flatten()[on_device].cpu().numpy()
    bounds = np.searchsorted(hits, np.arange(num_rows + 1) * vocab_size).tolist()
    ids = hits % vocab_size
    return [(ids[start:end], high[start:end]) for start, end in pairwise(bounds)]


def highest(values: Floats, count: int) -> Ids:
    """Return the indices of the `count` highest values, highest first, the lower one first among equals."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


# The arguments are logits, peaks [num_rows, 1] and chunks.
_Draw = Callable[[Tensor, Tensor, Sequence[Chunk]], list[int]]

_MASK64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15

# A block has so many logits. On the CPU it fits into the cache: 16 rows of 151,936 at once took half as long
# again as one by one. On a device it makes a call efficient, and needs little memory beside the pool.
_CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 24
_SORTED = 256  # This counts weights; see _nucleus.


def sample(
    logits: Tensor,
    chunks: Sequence[Chunk],
    masks: RowMasks = NO_MASKS,
    most_probable: Tensor | None = None,
) -> list[Sampled]:
    """Choose one token for each row of `logits` ([len(chunks), vocab_size], any dtype and device).

    `most_probable` are the ids of each row's highest logit, where they are known; among equals it is the
    lowest id.

    Each result depends on its own row, chunk and mask only. Of equal logits the lowest id comes first. Where
    a mask and bans leave nothing, NO_TOKEN is chosen.
    """
    plain = [takes_the_highest(chunk) for chunk in chunks]
    token_ids: list[int] = []
    if any(plain) and len(masks.rows) < len(chunks):
        token_ids = _argmax(logits) if most_probable is None else most_probable.tolist()
    rest = [row for row, is_plain in enumerate(plain) if not is_plain or row in masks.rows]
    sampled: dict[int, Sampled] = {}
    block = _CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK
    num_rows = max(1, block // logits.shape[1])
    for start in range(0, len(rest), num_rows):
        rows = rest[start : start + num_rows]
        sampled |= zip(rows, _sample_block(logits, rows, plain, chunks, masks), strict=True)
    return [sampled[row] if row in sampled else Sampled(token_ids[row]) for row in range(len(chunks))]


def _sample_block(
    logits: Tensor, rows: Sequence[int], plain: Sequence[bool], chunks: Sequence[Chunk], masks: RowMasks
) -> list[Sampled]:
    own = _rows(logits, rows)
    if all(plain[row] for row in rows):
        sampled = [Sampled(token_id) for token_id in _argmax(masks.applied(own, rows))]
    else:
        exact = own.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        sampled = _sample_rows(exact, [chunks[row] for row in rows], partial(masks.applied, rows=rows))
    checked = zip(rows, sampled, strict=True)
    return [
        each if each.token_id != NO_TOKEN and masks.allows(row, each.token_id) else Sampled(NO_TOKEN)
        for row, each in checked
    ]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), from a stream for each seed.

    It is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    return uniform_in(stream_of(seed), position)


def stream_of(seed: int) -> int:
    return _mix(seed)


def uniform_in(stream: int, position: int) -> float:
    return (_mix(stream + (position + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def takes_the_highest(chunk: Chunk) -> bool:
    params = chunk.sampling
    return params.greedy and params.logprobs is None and not is_adjusted(chunk)


def _sample_rows(
    logits: Tensor, chunks: Sequence[Chunk], masked: Callable[[Tensor], Tensor]
) -> list[Sampled]:
    adjusted = logits
    if any(map(is_adjusted, chunks)):
        has_logprobs = any(chunk.sampling.logprobs is not None for chunk in chunks)
        adjusted = adjust(logits.clone() if has_logprobs else logits, chunks)
    adjusted = masked(adjusted)
    peaks = adjusted.amax(1)
    highest: list[float] = peaks.tolist()
    # Without a finite peak the model has overflowed, and there is no distribution to draw from.
    drawn = [row for row, c in enumerate(chunks) if math.isfinite(highest[row]) and not c.sampling.greedy]
    token_ids = dict(zip(drawn, _draw(adjusted, peaks, drawn, chunks), strict=True))
    others = [row for row in range(len(chunks)) if row not in token_ids]
    if others:
        token_ids |= zip(others, _argmax(_rows(adjusted, others)), strict=True)
    chosen = [token_ids[row] for row in range(len(chunks))]
    logprobs = logprobs_of(logits, chosen, chunks)
    banned = {row for row, c in enumerate(chunks) if c.sampling.bad_token_ids and highest[row] == -math.inf}
    return [Sampled(NO_TOKEN if row in banned else i, logprobs.get(row)) for row, i in enumerate(chosen)]


def _rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(values):
        return values
    return values[rows[0]][None] if len(rows) == 1 else values[list(rows)]


def _argmax(values: Tensor) -> list[int]:
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        ids: list[int] = values.numpy().argmax(1).tolist()  # It takes a sixth of torch's time.
    else:
        ids = values.argmax(1).tolist()
    return ids


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _sums(weights: Tensor) -> Tensor:
    """Return the sums, [num_rows, 1].

    Unlike `sum`, this adds in the order of the ids, whatever rows and threads there are.
    """
    return weights.cumsum(1)[:, -1:]


def _draw(logits: Tensor, peaks: Tensor, rows: Sequence[int], chunks: Sequence[Chunk]) -> list[int]:
    ways: dict[_Draw, list[int]] = {}
    for row in rows:
        ways.setdefault(_way_to_draw(chunks[row].sampling), []).append(row)
    drawn: dict[int, int] = {}
    for draw, own in ways.items():
        token_ids = draw(_rows(logits, own), _rows(peaks, own)[:, None], [chunks[row] for row in own])
        drawn |= zip(own, token_ids, strict=True)
    return [drawn[row] for row in rows]


def _way_to_draw(params: SamplingParams) -> _Draw:
    if params.top_k:
        return _draw_from_highest
    return _draw_from_nucleus if params.top_p < 1 or params.min_p else _draw_from_all


def _weights(logits: Tensor, peaks: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    temperatures = _column([chunk.sampling.temperature for chunk in chunks], logits)
    return (logits - peaks).div_(temperatures).exp_()


def _draw_from_all(logits: Tensor, peaks: Tensor, chunks: Sequence[Chunk]) -> list[int]:
    weights = _weights(logits, peaks, chunks)
    cumulative = weights.cumsum(1)
    totals = cumulative[:, -1:].contiguous()
    points = _column([uniform_of(chunk) for chunk in chunks], weights) * totals
    # Ids of weight 0 add nothing to the sum, so "right" never stops at one; rounding may pass the last.
    found = torch.searchsorted(cumulative, points, right=True)
    token_ids: list[int] = found.minimum(torch.searchsorted(cumulative, totals))[:, 0].tolist()
    return token_ids


def _draw_from_highest(logits: Tensor, peaks: Tensor, chunks: Sequence[Chunk]) -> list[int]:
    candidates = at_least(floors(logits, [chunk.sampling.top_k for chunk in chunks]), logits)
    token_ids = []
    for chunk, peak, (ids, high) in zip(chunks, peaks[:, 0].tolist(), candidates, strict=True):
        kept = np.sort(highest(high, chunk.sampling.top_k))
        weights = np.exp((high[kept] - peak) / chunk.sampling.temperature)
        token_ids.append(_choose(ids[kept], weights, weights.sum(), chunk))
    return token_ids


def _draw_from_nucleus(logits: Tensor, peaks: Tensor, chunks: Sequence[Chunk]) -> list[int]:
    weights = _weights(logits, peaks, chunks)
    totals = _sums(weights)
    # Weights below this hold less than 1 - top_p together, so none of them is needed.
    lowest = _column([1 - chunk.sampling.top_p for chunk in chunks], weights) * totals / weights.shape[1]
    lowest = lowest.maximum(_column([chunk.sampling.min_p for chunk in chunks], weights))
    candidates = at_least(lowest, weights)
    return [
        _choose(ids, held, total, chunk)
        for chunk, total, (ids, held) in zip(chunks, totals[:, 0].tolist(), candidates, strict=True)
    ]


def _choose(ids: Ids, weights: Floats, total: float, chunk: Chunk) -> int:
    """Draw from the ascending `ids` that top_p and min_p keep; top_p is a share of `total`."""
    params = chunk.sampling
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p * total)
        ids, weights = ids[kept], weights[kept]
    weights = np.where(weights >= params.min_p, weights, 0.0)
    cumulative = weights.cumsum()
    found = np.searchsorted(cumulative, uniform_of(chunk) * cumulative[-1], side="right")
    return int(ids[min(found, np.searchsorted(cumulative, cumulative[-1]))])  # See _draw_from_all.


def uniform_of(chunk: Chunk) -> float:
    return uniform(chunk.sampling.seed, len(chunk.history))


def _nucleus(weights: Floats, wanted: float) -> NDArray[np.bool]:
    """Return which weights are kept: the fewest highest ones that sum to `wanted`, at least one.

    Among equals the first ones are kept, and all where their sum is less. Like quickselect this finds the
    lowest kept weight, so that only a few are sorted.
    """
    left, num_higher, held = weights, 0, 0.0  # All of the higher ones are kept.
    while len(left) > _SORTED:
        is_higher = left > left[len(left) // 2]
        if not is_higher.any():
            is_higher = left == left[len(left) // 2]
            if is_higher.all():
                break
        higher = left[is_higher]
        if held + (sum_of_higher := float(higher.sum())) >= wanted:
            left = higher
        else:
            left, num_higher, held = left[~is_higher], num_higher + len(higher), held + sum_of_higher
    ranked = np.sort(left)[::-1]
    # The sum before the later ones reaches `wanted`.
    last = int(np.searchsorted(held + ranked.cumsum()[:-1], wanted))
    kept: NDArray[np.bool] = weights > ranked[last]
    equal = np.flatnonzero(weights == ranked[last])
    kept[equal[: num_higher + last + 1 - np.count_nonzero(kept)]] = True
    return kept


def log_sums_of(logits: Tensor) -> Tensor:
    peaks = logits.amax(1, keepdim=True)
    return peaks + _sums((logits - peaks).exp_()).log_()


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int], chunks: Sequence[Chunk]
) -> dict[int, TokenLogprobs]:
    counts = {row: c.sampling.logprobs for row, c in enumerate(chunks) if c.sampling.logprobs is not None}
    if not counts:
        return {}
    rows = list(counts)
    logits = _rows(logits, rows)
    log_sums = log_sums_of(logits)
    chosen = torch.tensor([token_ids[row] for row in rows], device=logits.device)[:, None]
    own = torch.cat((log_sums, logits.gather(1, chosen) - log_sums), 1).tolist()
    candidates = at_least(floors(logits, list(counts.values())), logits)
    found = {}
    for row, (log_sum, logprob), (ids, high) in zip(rows, own, candidates, strict=True):
        if not math.isfinite(log_sum):  # The model has overflowed, and no token has a probability.
            found[row] = TokenLogprobs(token_ids[row], -math.inf, ())
            continue
        top = highest(high, counts[row])
        pairs = zip(ids[top].tolist(), (high[top] - log_sum).tolist(), strict=True)
        found[row] = TokenLogprobs(token_ids[row], logprob, tuple(pairs))
    return found
