"""These Triton functions load, order and weigh logits for the kernels that draw."""

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**42)
BOTTOM = tl.constexpr(40.0)  # A logit so many temperatures below the peak weighs far less than a unit.
SHIFT = tl.constexpr(1.5 * 2.0**23)  # Its bits are 0x4B400000.
TO_EXPONENT = tl.constexpr(127 - 0x4B400000)


@triton.jit
def loaded(logits, ids, is_id):
    values = tl.load(logits + ids, mask=is_id, other=-float("inf"))
    # Float32 represents narrower types exactly.
    return values if values.dtype == tl.float64 else values.to(tl.float32)


@triton.jit
def keys_of(values):
    """Return integers in the order of the values; both zeros get the same."""
    values = tl.where(values == 0, 0.0, values).to(values.dtype)
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True)
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = values.to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def distances_of(values, peak, inverse):
    """Return the distances below the peak, limited to a bit more than those with any weight."""
    distances = (values - peak.to(values.dtype)).to(tl.float32)
    return tl.maximum(distances, ((-1 / inverse) * BOTTOM).to(tl.float32))


@triton.jit
def units_of(distances, factor):
    """Return the weights of the distances, 2**(whole + fraction) of the peak's.

    Kernels must agree on these to the bit. A compiler may fuse a product and a sum, or not, so each operation
    here is fused explicitly or exact. `factor` points to two numbers that both fit into float32.
    """
    high, low = tl.load(factor).to(tl.float32), tl.load(factor + 1).to(tl.float32)
    # The sum rounds the fraction off, and leaves the whole number in the lowest bits.
    shifted = tl.fma(distances, high, SHIFT)
    fraction = tl.fma(distances, low, tl.fma(distances, high, -(shifted - SHIFT)))
    whole = ((shifted.to(tl.int32, bitcast=True) + TO_EXPONENT) << 23).to(tl.float32, bitcast=True)
    return (tl.exp2(fraction) * whole * UNIT + 0.5).to(tl.int64)


@triton.jit
def highest_of(bounds, at, is_stripe):
    """Return the row's highest logit, or NaN where it has one."""
    peaks = tl.load(bounds + at, mask=is_stripe, other=-float("inf"))
    is_nan = peaks != peaks
    peak = tl.max(tl.where(is_nan, float("inf"), peaks), 0)
    return tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), peak)
