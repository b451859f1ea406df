"""Triton kernels draw a token for each row of logits on a GPU.

1. _find_peaks finds each stripe's highest and lowest logit.
2. _add_up sums the weight of the logits down to 8 distances from the peak. It runs three times, each time
   within one of the previous distances. It and the next two kernels run only where top_k or top_p cut.
3. _gather collects the ids in the range that contains the cut.
4. _settle finds the cut itself: a logit, and the last id that is kept among those equal to it.
5. _sum_kept sums the kept weight of each stripe, with min_p.
6. _choose finds the id at the given point, or the highest one.

The programs of a launch compute stripes of rows, so that few rows occupy the whole device; 4 and 6 have one
program per row.

A weight, e**((logit - peak) / temperature), is rounded to float32 and counted in units of 2**-42, so that
sums are of integers, which are exact in any order. So a row's draw does not depend on the other rows of its
launch, or on the number of programs. torch_sampler.py's weights are float64, so the drawn id differs from its
choice for points within a millionth of a boundary. Logits are compared themselves: where two differ and their
weights in float64 do not, torch_sampler.py chooses the lower id instead of the higher one.

No kernel waits for the host. `make gpu` tests this on a GPU, and `make test-triton` without one in Triton's
interpreter.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.sampling.draw_kernel_functions import (
    UNIT,
    distances_of,
    highest_of,
    keys_of,
    loaded,
    units_of,
)

# These are columns of a table of rows. `INVERSE` is that of the temperature, and 0 where the highest logit is
# chosen. `FACTOR` is that times log2(e), in float32, and the last column is its rounding error, in float32.
ROW, INVERSE, TOP_P, MIN_P, POINT, TOP_K, FACTOR = range(7)
FIELDS = 8
MAX_VOCAB_SIZE = 1 << 20  # The sum of more weights would not fit into an integer.

STRIPE = 4096
_CANDIDATES = 1024  # _settle reads so many at a time.
_NUM_WARPS = 8

_FIELDS = tl.constexpr(FIELDS)
_INVERSE, _TOP_P, _MIN_P = tl.constexpr(INVERSE), tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_POINT, _TOP_K, _FACTOR = tl.constexpr(POINT), tl.constexpr(TOP_K), tl.constexpr(FACTOR)
_FARTHEST = tl.constexpr(29.9)  # e to the minus this rounds to no unit: it is 43.1 times log(2).
WAYS, LEVELS = 8, 3  # The numbers of distances have so many octal digits.
_WAYS, _LEVELS, _BINS = tl.constexpr(WAYS), tl.constexpr(LEVELS), tl.constexpr(WAYS**LEVELS)
_STEPS = tl.constexpr(16)
_LOWEST_KEY = tl.constexpr(-(2**63))
_LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _bins(distances, inverse, width):
    """Return the numbers of distances with weight, in a row whose logits span `width`."""
    farthest = tl.maximum(tl.minimum((1 / inverse) * _FARTHEST, width), 1e-30)
    scale = ((1 / farthest) * _BINS).to(tl.float32)
    return tl.minimum(-distances * scale, _BINS - 1.0).to(tl.int32)


@triton.jit
def _held(sums, at, is_stripe, NUM_STRIPES: tl.constexpr):
    ways = tl.arange(0, _WAYS)
    places = ways[:, None] * NUM_STRIPES + at[None, :]
    return tl.sum(tl.load(sums + places, mask=is_stripe[None, :], other=0), 1)


@triton.jit
def _share(total, top_p):
    """Return the least integer that is not less than a share of the total, which is at least 1."""
    exact = total.to(tl.float64) * top_p
    share = exact.to(tl.int64)
    return tl.minimum(share + (share.to(tl.float64) < exact).to(tl.int64), total)


@triton.jit
def _wanted(held, top_k, top_p):
    """Return what the highest logits must hold: their number with top_k, otherwise units."""
    share = _share(tl.max(held, 0), top_p)
    return tl.where(top_k > 0, top_k.to(tl.int64), share)


@triton.jit
def _digit(held, wanted):
    """Return the first digit down to which so much is held, or the last digit."""
    return tl.minimum(tl.sum((held < wanted).to(tl.int32), 0), _WAYS - 1)


@triton.jit
def _cut_bin(sums, at, is_stripe, top_k, top_p, levels, NUM_STRIPES: tl.constexpr):
    """Return the first digits of the cut's bin, what must be held, and what is held above it."""
    ways = tl.arange(0, _WAYS)
    chosen = tl.full([], 0, tl.int32)
    wanted, above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for level in range(0, levels):
        held = _held(sums + level * _WAYS * NUM_STRIPES, at, is_stripe, NUM_STRIPES)
        if level == 0:
            wanted = _wanted(held, top_k, top_p)
        digit = _digit(held, wanted)
        above = tl.maximum(above, tl.max(tl.where(ways < digit, held, 0), 0))
        chosen = chosen * _WAYS + digit
    return chosen, wanted, above


@triton.jit
def _find_peaks(logits, stride, vocab_size, table, bounds, counts, cuts, STRIPE: tl.constexpr):
    """Find the peaks, and reset what the next kernels change: no candidates, and a cut below all."""
    nth, stripe, num_stripes = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    logits += tl.load(table + nth * _FIELDS).to(tl.int64) * stride
    ids = stripe * STRIPE + tl.arange(0, STRIPE)
    values = loaded(logits, ids, ids < vocab_size)
    is_nan = values != values
    peak = tl.max(tl.where(is_nan, float("inf"), values), 0).to(tl.float64)
    peak = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), peak)
    lowest = tl.min(tl.where(values > -float("inf"), values, float("inf")), 0).to(tl.float64)
    bounds += nth * 2 * num_stripes + stripe
    tl.store(bounds, peak)
    tl.store(bounds + num_stripes, lowest)
    if stripe == 0:
        tl.store(counts + nth, 0)
        tl.store(cuts + nth * 2, _LOWEST_KEY)
        tl.store(cuts + nth * 2 + 1, _LAST_ID)


@triton.jit(do_not_specialize=["level"])
def _add_up(
    logits,
    stride,
    vocab_size,
    table,
    bounds,
    sums,
    level,
    STRIPE: tl.constexpr,
    NUM_STRIPES: tl.constexpr,
    PADDED: tl.constexpr,
):
    nth, stripe = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table += nth * _FIELDS
    inverse, top_p, top_k = tl.load(table + _INVERSE), tl.load(table + _TOP_P), tl.load(table + _TOP_K)
    at = tl.arange(0, PADDED)
    is_stripe = at < NUM_STRIPES
    bounds += nth * 2 * NUM_STRIPES
    peak = highest_of(bounds, at, is_stripe)
    if (inverse > 0) & (tl.abs(peak) < float("inf")) & ((top_k > 0) | (top_p < 1)):
        lowest = tl.min(tl.load(bounds + NUM_STRIPES + at, mask=is_stripe, other=float("inf")), 0)
        ids = stripe * STRIPE + tl.arange(0, STRIPE)
        values = loaded(logits + tl.load(table).to(tl.int64) * stride, ids, ids < vocab_size)
        distances = distances_of(values, peak, inverse)
        units = units_of(distances, table + _FACTOR)
        measured = tl.where(top_k > 0, (units > 0).to(tl.int64), units)
        sums += nth * _LEVELS * _WAYS * NUM_STRIPES
        chosen, _, _ = _cut_bin(sums, at, is_stripe, top_k, top_p, level, NUM_STRIPES)
        bins = _bins(distances, inverse, peak - lowest)
        digits = (bins >> (3 * (_LEVELS - 1 - level))) - chosen * _WAYS
        sums += level * _WAYS * NUM_STRIPES
        for way in tl.static_range(_WAYS):
            tl.store(sums + way * NUM_STRIPES + stripe, tl.sum(tl.where(digits <= way, measured, 0), 0))


@triton.jit
def _gather(
    logits,
    stride,
    vocab_size,
    table,
    bounds,
    sums,
    counts,
    candidates,
    STRIPE: tl.constexpr,
    NUM_STRIPES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Collect the candidates; with top_k these are all that may be kept, since top_p needs their sum."""
    nth, stripe = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table += nth * _FIELDS
    inverse, top_p, top_k = tl.load(table + _INVERSE), tl.load(table + _TOP_P), tl.load(table + _TOP_K)
    at = tl.arange(0, PADDED)
    is_stripe = at < NUM_STRIPES
    bounds += nth * 2 * NUM_STRIPES
    peak = highest_of(bounds, at, is_stripe)
    if (inverse > 0) & (tl.abs(peak) < float("inf")) & ((top_k > 0) | (top_p < 1)):
        lowest = tl.min(tl.load(bounds + NUM_STRIPES + at, mask=is_stripe, other=float("inf")), 0)
        ids = stripe * STRIPE + tl.arange(0, STRIPE)
        values = loaded(logits + tl.load(table).to(tl.int64) * stride, ids, ids < vocab_size)
        distances = distances_of(values, peak, inverse)
        units = units_of(distances, table + _FACTOR)
        sums += nth * _LEVELS * _WAYS * NUM_STRIPES
        chosen, _, _ = _cut_bin(sums, at, is_stripe, top_k, top_p, _LEVELS, NUM_STRIPES)
        bins = _bins(distances, inverse, peak - lowest)
        taken = (units > 0) & (bins <= chosen) & (bins >= tl.where(top_k > 0, 0, chosen))
        taken_before = tl.cumsum(taken.to(tl.int32), 0) - 1
        first = tl.atomic_add(counts + nth, tl.sum(taken.to(tl.int32), 0))
        tl.store(candidates + nth * vocab_size + first + taken_before, ids, mask=taken)


@triton.jit
def _candidates_from(
    logits, table, candidates, start, count, peak, inverse, key, last_id, CHUNK: tl.constexpr
):
    """Return the ids, keys and units of some candidates; those that are not kept have no units."""
    nth = start + tl.arange(0, CHUNK)
    ids = tl.load(candidates + nth, mask=nth < count, other=0)
    values = loaded(logits, ids, nth < count)
    keys = keys_of(values)
    units = units_of(distances_of(values, peak, inverse), table + _FACTOR)
    is_kept = (keys > key) | ((keys == key) & (ids <= last_id))
    return ids, keys, tl.where(is_kept, units, 0)


@triton.jit
def _settle(
    logits,
    stride,
    vocab_size,
    table,
    bounds,
    sums,
    counts,
    candidates,
    cuts,
    NUM_STRIPES: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    nth = tl.program_id(0).to(tl.int64)
    table += nth * _FIELDS
    inverse, top_p, top_k = tl.load(table + _INVERSE), tl.load(table + _TOP_P), tl.load(table + _TOP_K)
    at = tl.arange(0, PADDED)
    is_stripe = at < NUM_STRIPES
    peak = highest_of(bounds + nth * 2 * NUM_STRIPES, at, is_stripe)
    if (inverse > 0) & (tl.abs(peak) < float("inf")) & ((top_k > 0) | (top_p < 1)):
        logits += tl.load(table).to(tl.int64) * stride
        candidates += nth * vocab_size
        count = tl.load(counts + nth)
        sums += nth * _LEVELS * _WAYS * NUM_STRIPES
        # Everything above all candidates is kept, and none of it is a candidate.
        _, share, above = _cut_bin(sums, at, is_stripe, top_k, top_p, _LEVELS, NUM_STRIPES)
        steps = 1 + tl.arange(0, _STEPS).to(tl.int64)
        above = tl.where(top_k > 0, 0, above)
        # A logit is kept if its key is above this one, or if its key is equal and its id is at most that one.
        key = tl.full([], _LOWEST_KEY, tl.int64)
        last_id = tl.full([], _LAST_ID, tl.int64)
        for by_units in range(0, 2):
            if ((by_units == 0) & (top_k > 0)) | ((by_units == 1) & (top_p < 1)):
                low = tl.full([], 2**63 - 1, tl.int64)
                high = tl.full([], _LOWEST_KEY, tl.int64)
                total = tl.full([], 0, tl.int64)
                for start in range(0, count, CHUNK):
                    ids, keys, units = _candidates_from(
                        logits, table, candidates, start, count, peak, inverse, key, last_id, CHUNK
                    )
                    low = tl.minimum(low, tl.min(tl.where(units > 0, keys, 2**63 - 1), 0))
                    high = tl.maximum(high, tl.max(tl.where(units > 0, keys, _LOWEST_KEY), 0))
                    total += tl.sum(tl.where(by_units == 1, units, (units > 0).to(tl.int64)), 0)
                wanted = tl.where(by_units == 1, share, top_k.to(tl.int64))
                if (by_units == 1) & (top_k > 0):
                    wanted = _share(total, top_p)
                if above + total >= wanted:
                    # So much is held down to `low`, and less down to `high`.
                    high += 1
                    while low + 1 < high:
                        step = tl.maximum((high >> 4) - (low >> 4), 1)
                        tried = low + step * steps
                        held = tl.zeros([_STEPS], tl.int64) + above
                        for start in range(0, count, CHUNK):
                            ids, keys, units = _candidates_from(
                                logits, table, candidates, start, count, peak, inverse, key, last_id, CHUNK
                            )
                            measured = tl.where(by_units == 1, units, (units > 0).to(tl.int64))
                            held += tl.sum(tl.where(keys[:, None] >= tried[None, :], measured[:, None], 0), 0)
                        num_low = tl.sum((held >= wanted).to(tl.int64), 0)
                        next_tried = tl.minimum(high, low + step * (num_low + 1))
                        high = tl.where(num_low < _STEPS, next_tried, high)
                        low += step * num_low
                    # Of those that equal it the first ones are kept, as many as needed.
                    lacking, each = wanted - above, tl.full([], 1, tl.int64)
                    num_equal = tl.full([], 0, tl.int64)
                    for start in range(0, count, CHUNK):
                        ids, keys, units = _candidates_from(
                            logits, table, candidates, start, count, peak, inverse, key, last_id, CHUNK
                        )
                        measured = tl.where(by_units == 1, units, (units > 0).to(tl.int64))
                        lacking -= tl.sum(tl.where(keys > low, measured, 0), 0)
                        is_equal = (keys == low) & (units > 0)
                        num_equal += tl.sum(is_equal.to(tl.int64), 0)
                        each = tl.maximum(each, tl.max(tl.where(is_equal, measured, 0), 0))
                    lacking = (lacking + each - 1) // each
                    first, end = tl.full([], -1, tl.int64), tl.minimum(last_id, vocab_size - 1)
                    if key < low:
                        end = tl.full([], 0, tl.int64) + vocab_size - 1
                    # So many are not reached up to `first`, and are up to `end`.
                    while (first + 1 < end) & (lacking < num_equal):
                        step = tl.maximum((end - first) >> 4, 1)
                        tried = first + step * steps
                        reached = tl.zeros([_STEPS], tl.int64)
                        for start in range(0, count, CHUNK):
                            ids, keys, units = _candidates_from(
                                logits, table, candidates, start, count, peak, inverse, key, last_id, CHUNK
                            )
                            is_equal = (keys == low) & (units > 0)
                            is_reached = is_equal[:, None] & (ids.to(tl.int64)[:, None] <= tried[None, :])
                            reached += tl.sum(is_reached.to(tl.int64), 0)
                        num_first = tl.sum((reached < lacking).to(tl.int64), 0)
                        next_tried = tl.minimum(end, first + step * (num_first + 1))
                        end = tl.where(num_first < _STEPS, next_tried, end)
                        first += step * num_first
                    key, last_id = low, end
        tl.store(cuts + nth * 2, key)
        tl.store(cuts + nth * 2 + 1, last_id)


@triton.jit
def _kept_units(values, ids, table, peak, inverse, key, last_id):
    min_p = tl.load(table + _MIN_P)
    keys, units = keys_of(values), units_of(distances_of(values, peak, inverse), table + _FACTOR)
    is_kept = (keys > key) | ((keys == key) & (ids <= last_id))
    return tl.where(is_kept & (units >= (min_p * UNIT).to(tl.int64)), units, 0)


@triton.jit
def _sum_kept(
    logits,
    stride,
    vocab_size,
    table,
    bounds,
    cuts,
    kept,
    STRIPE: tl.constexpr,
    NUM_STRIPES: tl.constexpr,
    PADDED: tl.constexpr,
):
    nth, stripe = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table += nth * _FIELDS
    inverse = tl.load(table + _INVERSE)
    at = tl.arange(0, PADDED)
    peak = highest_of(bounds + nth * 2 * NUM_STRIPES, at, at < NUM_STRIPES)
    if (inverse > 0) & (tl.abs(peak) < float("inf")):
        key, last_id = tl.load(cuts + nth * 2), tl.load(cuts + nth * 2 + 1)
        ids = stripe * STRIPE + tl.arange(0, STRIPE)
        values = loaded(logits + tl.load(table).to(tl.int64) * stride, ids, ids < vocab_size)
        units = _kept_units(values, ids, table, peak, inverse, key, last_id)
        tl.store(kept + nth * NUM_STRIPES + stripe, tl.sum(units, 0))


@triton.jit(do_not_specialize_on_alignment=["chosen"])
def _choose(
    logits,
    stride,
    vocab_size,
    table,
    bounds,
    cuts,
    kept,
    chosen,
    STRIPE: tl.constexpr,
    NUM_STRIPES: tl.constexpr,
    PADDED: tl.constexpr,
):
    nth = tl.program_id(0).to(tl.int64)
    table += nth * _FIELDS
    logits += tl.load(table).to(tl.int64) * stride
    inverse = tl.load(table + _INVERSE)
    at = tl.arange(0, PADDED)
    is_stripe = at < NUM_STRIPES
    bounds += nth * 2 * NUM_STRIPES
    peak = highest_of(bounds, at, is_stripe)
    if (inverse > 0) & (tl.abs(peak) < float("inf")):
        key, last_id = tl.load(cuts + nth * 2), tl.load(cuts + nth * 2 + 1)
        held = tl.load(kept + nth * NUM_STRIPES + at, mask=is_stripe, other=0)
        total = tl.sum(held, 0)
        point = (total.to(tl.float64) * tl.load(table + _POINT)).to(tl.int64)
        point = tl.minimum(point, total - 1)
        stripe = tl.sum((tl.cumsum(held, 0) <= point).to(tl.int32), 0)
        point -= tl.sum(tl.where(at < stripe, held, 0), 0)
        ids = stripe * STRIPE + tl.arange(0, STRIPE)
        values = loaded(logits, ids, ids < vocab_size)
        units = _kept_units(values, ids, table, peak, inverse, key, last_id)
        passed = tl.sum((tl.cumsum(units, 0) <= point).to(tl.int32), 0)
        tl.store(chosen + nth, (stripe * STRIPE + passed).to(tl.int64))
    else:
        # NaN is higher than all, and where all are -inf there is none.
        peaks = tl.load(bounds + at, mask=is_stripe, other=-float("inf"))
        is_peak = tl.where(peak != peak, peaks != peaks, peaks == peak) & is_stripe
        stripe = tl.min(tl.where(is_peak, at, PADDED), 0)
        ids = stripe * STRIPE + tl.arange(0, STRIPE)
        wide = loaded(logits, ids, ids < vocab_size).to(tl.float64)
        is_highest = tl.where(peak != peak, wide != wide, wide == peak) & (ids < vocab_size)
        highest = tl.min(tl.where(is_highest, ids, _LAST_ID), 0).to(tl.int64)
        tl.store(chosen + nth, tl.where(peak == -float("inf"), -1, highest))


@dataclass(frozen=True, slots=True)
class Scratch:
    """The kernels pass data about so many rows in it. Launches of one stream may share it."""

    num_rows: int
    bounds: Tensor
    sums: Tensor
    counts: Tensor
    candidates: Tensor
    cuts: Tensor
    kept: Tensor

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, device: torch.device, stripe: int = STRIPE) -> "Scratch":
        num_stripes = -(-vocab_size // stripe)
        integers = {"dtype": torch.int64, "device": device}
        with torch.inference_mode(False):
            return cls(
                num_rows,
                torch.empty(num_rows, 2, num_stripes, dtype=torch.float64, device=device),
                torch.empty(num_rows, LEVELS, WAYS, num_stripes, **integers),
                torch.empty(num_rows, dtype=torch.int32, device=device),
                torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device),
                torch.empty(num_rows, 2, **integers),
                torch.empty(num_rows, num_stripes, **integers),
            )


def launch(
    logits: Tensor, table: Tensor, chosen: Tensor, scratch: Scratch, *, cuts: bool, stripe: int = STRIPE
) -> None:
    """Write the ids that rows of the table choose to `chosen`, int64 [num_rows]; -1 where all are -inf.

    `logits` are [any number, vocab_size], of any floating type, `table` is float64 [num_rows, FIELDS]. `cuts`
    is whether any row has top_k (below the vocabulary's size, else 0) or a top_p below 1.
    """
    num_rows, vocab_size, stride = len(table), logits.shape[1], logits.stride(0)
    assert logits.stride(1) == 1 and num_rows <= scratch.num_rows and vocab_size <= MAX_VOCAB_SIZE
    num_stripes = -(-vocab_size // stripe)
    padded = _padded(num_stripes)
    about = (logits, stride, vocab_size, table, scratch.bounds)
    by_stripe = {"STRIPE": stripe, "NUM_STRIPES": num_stripes, "PADDED": padded, "num_warps": _NUM_WARPS}
    by_row = {"NUM_STRIPES": num_stripes, "PADDED": padded, "CHUNK": _CANDIDATES, "num_warps": _NUM_WARPS}
    stripes = (num_rows, num_stripes)
    found = (scratch.sums, scratch.counts, scratch.candidates)
    with torch.cuda.device_of(logits):  # Triton launches on the current device.
        _find_peaks[stripes](*about, scratch.counts, scratch.cuts, STRIPE=stripe, num_warps=_NUM_WARPS)
        if cuts:
            for level in range(LEVELS):
                _add_up[stripes](*about, scratch.sums, level, **by_stripe)
            _gather[stripes](*about, *found, **by_stripe)
            _settle[num_rows,](*about, *found, scratch.cuts, **by_row)
        _sum_kept[stripes](*about, scratch.cuts, scratch.kept, **by_stripe)
        _choose[num_rows,](*about, scratch.cuts, scratch.kept, chosen, **by_stripe)


@cache
def _padded(num_stripes: int) -> int:
    padded: int = triton.next_power_of_2(num_stripes)
    return padded
