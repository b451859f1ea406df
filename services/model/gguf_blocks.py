"""Blocks of quantized values, as ggml-common.h lays them out, are numbers in float32 here.

Q4_0, Q5_0, Q8_0   32 values and their scale
Q4_1, Q5_1         32 values, their scale and their least
Q2_K .. Q6_K       256 values in parts of 16 or 32, each with a scale (and a least) that is a whole number
                   itself and has a scale of the block
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_BLOCK, _LARGE_BLOCK = 32, 256


@dataclass(frozen=True, slots=True)
class BlockType:
    name: str
    values: int  # in one item of `dtype`
    dtype: np.dtype[Any]
    floats: Callable[[NDArray[Any]], Floats]  # of items, in the order of the values


def _plain(items: NDArray[Any]) -> Floats:
    return items.astype(np.float32)


def _bfloat16(items: NDArray[Any]) -> Floats:
    return (items.astype(np.uint32) << 16).view(np.float32)


def _column(numbers: NDArray[Any]) -> Floats:
    return numbers.astype(np.float32)[:, None]


def _nibbles(values: NDArray[Any], size: int = 16) -> NDArray[Any]:
    """Return the low halves of `size` bytes as so many values, and then the high halves, [n, 2 x bytes]."""
    parts = values.reshape(len(values), -1, 1, size)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(values), -1)


def _fifth_bits(items: NDArray[Any]) -> NDArray[Any]:
    """Return the fifth bit of each of 32 values as 0 or 16: bit i of the four bytes is value i's."""
    return np.unpackbits(items["high"], axis=1, bitorder="little") << 4


def _q4_0(items: NDArray[Any]) -> Floats:
    values: Floats = _nibbles(items["values"]).astype(np.float32) - 8
    return values * _column(items["scale"])


def _q4_1(items: NDArray[Any]) -> Floats:
    values: Floats = _nibbles(items["values"]).astype(np.float32)
    values = values * _column(items["scale"]) + _column(items["least"])
    return values


def _q5_0(items: NDArray[Any]) -> Floats:
    values: Floats = (_nibbles(items["values"]) | _fifth_bits(items)).astype(np.float32) - 16
    return values * _column(items["scale"])


def _q5_1(items: NDArray[Any]) -> Floats:
    values: Floats = (_nibbles(items["values"]) | _fifth_bits(items)).astype(np.float32)
    values = values * _column(items["scale"]) + _column(items["least"])
    return values


def _q8_0(items: NDArray[Any]) -> Floats:
    return items["values"].astype(np.float32) * _column(items["scale"])


def _scaled(values: NDArray[Any], scale: NDArray[Any], scales: NDArray[Any]) -> Floats:
    """Return `values` [n, 256] times the scale of their part, which is the block's times its own."""
    parts = values.astype(np.float32).reshape(*scales.shape, -1)
    own = _column(scale) * scales.astype(np.float32)
    return (parts * own[:, :, None]).reshape(values.shape)


def _less_least(floats: Floats, least: NDArray[Any], leasts: NDArray[Any]) -> Floats:
    own = _column(least) * leasts.astype(np.float32)
    return (floats.reshape(*leasts.shape, -1) - own[:, :, None]).reshape(floats.shape)


def _q2_k(items: NDArray[Any]) -> Floats:
    scaled = _scaled(_two_bits(items["values"]), items["scale"], items["scales"] & 15)
    return _less_least(scaled, items["least"], items["scales"] >> 4)


def _q3_k(items: NDArray[Any]) -> Floats:
    # Bit i of byte k of `high` is of value k of the i-th 32; where it is not set, 4 is subtracted.
    high = items["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    values = _two_bits(items["values"]).astype(np.int8) - ((1 - high).reshape(len(items), -1) << 2).astype(
        np.int8
    )
    stored = items["scales"]
    low = np.concatenate([stored[:, :8] & 15, stored[:, :8] >> 4], axis=1)
    two = (stored[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[None, :, None] & 3).reshape(len(items), -1)
    return _scaled(values, items["scale"], (low | two << 4).astype(np.int8) - 32)


def _q4_k(items: NDArray[Any]) -> Floats:
    scales, leasts = _six_bits(items["scales"])
    scaled = _scaled(_nibbles(items["values"], 32), items["scale"], scales)
    return _less_least(scaled, items["least"], leasts)


def _q5_k(items: NDArray[Any]) -> Floats:
    # Bit i of byte k of `high` is of value k of the i-th 32.
    high = items["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    values = _nibbles(items["values"], 32) | (high << 4).reshape(len(items), -1)
    scales, leasts = _six_bits(items["scales"])
    return _less_least(_scaled(values, items["scale"], scales), items["least"], leasts)


def _q6_k(items: NDArray[Any]) -> Floats:
    # Of each 128 values 64 bytes have the low halves, of 32 values the two bits that are missing.
    values = _nibbles(items["values"], 64) | _two_bits(items["high"]) << 4
    return _scaled(values.astype(np.int8) - 32, items["scale"], items["scales"])


def _two_bits(values: NDArray[Any]) -> NDArray[Any]:
    """Return four values for each byte; those of 32 bytes have their lowest bits first."""
    parts = values.reshape(len(values), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    return (parts >> shifts & 3).reshape(len(values), -1)


def _six_bits(stored: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return 8 scales and 8 leasts of 12 bytes: the first four of each whole, the others in two pieces."""
    first, second, rest = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    leasts = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    return scales, leasts


def _fields(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype([(name, kind, *((count,) for count in size)) for name, kind, *size in fields])


_SCALE, _LEAST = ("scale", "<f2"), ("least", "<f2")
_HIGH, _SMALL, _SCALES = ("high", "u1", 4), ("values", "u1", 16), ("scales", "u1", 12)
BLOCK_TYPES = {
    0: BlockType("F32", 1, np.dtype("<f4"), _plain),
    1: BlockType("F16", 1, np.dtype("<f2"), _plain),
    30: BlockType("BF16", 1, np.dtype("<u2"), _bfloat16),
    2: BlockType("Q4_0", _BLOCK, _fields(_SCALE, _SMALL), _q4_0),
    3: BlockType("Q4_1", _BLOCK, _fields(_SCALE, _LEAST, _SMALL), _q4_1),
    6: BlockType("Q5_0", _BLOCK, _fields(_SCALE, _HIGH, _SMALL), _q5_0),
    7: BlockType("Q5_1", _BLOCK, _fields(_SCALE, _LEAST, _HIGH, _SMALL), _q5_1),
    8: BlockType("Q8_0", _BLOCK, _fields(_SCALE, ("values", "i1", 32)), _q8_0),
    10: BlockType(
        "Q2_K", _LARGE_BLOCK, _fields(("scales", "u1", 16), ("values", "u1", 64), _SCALE, _LEAST), _q2_k
    ),
    11: BlockType(
        "Q3_K", _LARGE_BLOCK, _fields(("high", "u1", 32), ("values", "u1", 64), _SCALES, _SCALE), _q3_k
    ),
    12: BlockType("Q4_K", _LARGE_BLOCK, _fields(_SCALE, _LEAST, _SCALES, ("values", "u1", 128)), _q4_k),
    13: BlockType(
        "Q5_K",
        _LARGE_BLOCK,
        _fields(_SCALE, _LEAST, _SCALES, ("high", "u1", 32), ("values", "u1", 128)),
        _q5_k,
    ),
    14: BlockType(
        "Q6_K",
        _LARGE_BLOCK,
        _fields(("values", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE),
        _q6_k,
    ),
}
# Only a message names these types.
UNREAD_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
