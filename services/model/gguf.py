"""This module reads a GGUF file: its metadata, its tensors, and their values as float32.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. Metadata have keys; a value of a
wrong type is refused by its key. Blocks of quantized values are those of ggml-common.h:

- Q4_0, Q5_0 and Q8_0 have 32 values and their scale.
- Q4_1 and Q5_1 have 32 values, their scale and their minimum.
- Q2_K to Q6_K have 256 values in parts of 16 or 32. Each part has a scale (and a minimum), an integer that is
  scaled by the block's own.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.values.errors import ConfigError

Metadata = Mapping[str, Any]

_KINDS: Mapping[type, str] = {str: "texts", int: "whole numbers"}


def tokens_of(metadata: Metadata) -> Sequence[str]:
    tokens: Sequence[str] = list_of(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ConfigError("the GGUF file has no tokens (tokenizer.ggml.tokens)")
    return tokens


def special_ids(metadata: Metadata, names: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of special tokens that the file states; `names` maps our names to the file's."""
    num_tokens = len(tokens_of(metadata))
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names.items()}
    known = {name: metadata[key] for name, key in keys.items() if key in metadata}
    if wrong := [keys[name] for name, id_ in known.items() if not (_is_count(id_) and id_ < num_tokens)]:
        raise ConfigError(f"the GGUF file is damaged: {wrong[0]} is none of its {num_tokens} tokens")
    return known


def list_of(metadata: Metadata, key: str, kind: type) -> Sequence[Any]:
    values = metadata.get(key, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ConfigError(f"the GGUF file is damaged: its {key} is no list of {_KINDS[kind]}")
    return values


def text_of(metadata: Metadata, key: str) -> str:
    value = metadata.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"the GGUF file is damaged: its {key} is no text")
    return value


def number(metadata: Metadata, name: str, default: float | None = None) -> float:
    """Return a number whose key begins with the model's family."""
    key = _key(metadata, name)
    value = metadata.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"the GGUF file's {key} is {value!r}, not a number")
    return float(value)


def count(metadata: Metadata, name: str, default: int | None = None) -> int:
    key = _key(metadata, name)
    value = metadata.get(key, default)
    if not _is_count(value):
        raise ConfigError(f"the GGUF file's {key} is {value!r}, not a whole number")
    return int(value)


def _key(metadata: Metadata, name: str) -> str:
    return f"{metadata['general.architecture']}.{name}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


Floats = NDArray[np.float32]

_BLOCK, _LARGE_BLOCK = 32, 256


@dataclass(frozen=True, slots=True)
class BlockType:
    name: str
    values: int  # One item of `dtype` has so many.
    dtype: np.dtype[Any]
    floats: Callable[[NDArray[Any]], Floats]  # It returns the items' values in order.


def _plain(items: NDArray[Any]) -> Floats:
    return items.astype(np.float32)


def _bfloat16(items: NDArray[Any]) -> Floats:
    return (items.astype(np.uint32) << 16).view(np.float32)


def _column(numbers: NDArray[Any]) -> Floats:
    return numbers.astype(np.float32)[:, None]


def _nibbles(values: NDArray[Any], size: int = 16) -> NDArray[Any]:
    """Return the low halves of `size` bytes, and then the high halves, [n, 2 x bytes]."""
    parts = values.reshape(len(values), -1, 1, size)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(values), -1)


def _fifth_bits(items: NDArray[Any]) -> NDArray[Any]:
    """Return the fifth bit of each of 32 values as 0 or 16: bit i of the four bytes belongs to value i."""
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
    # Bit i of byte k of `high` belongs to value k of the i-th 32; where it is not set, 4 is subtracted.
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
    # Bit i of byte k of `high` belongs to value k of the i-th 32.
    high = items["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    values = _nibbles(items["values"], 32) | (high << 4).reshape(len(items), -1)
    scales, leasts = _six_bits(items["scales"])
    return _less_least(_scaled(values, items["scale"], scales), items["least"], leasts)


def _q6_k(items: NDArray[Any]) -> Floats:
    # For each 128 values, 64 bytes have the low halves, and 32 bytes of `high` have the other two bits.
    values = _nibbles(items["values"], 64) | _two_bits(items["high"]) << 4
    return _scaled(values.astype(np.int8) - 32, items["scale"], items["scales"])


def _two_bits(values: NDArray[Any]) -> NDArray[Any]:
    """Return four values for each byte; those of 32 bytes have their lowest bits first."""
    parts = values.reshape(len(values), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    return (parts >> shifts & 3).reshape(len(values), -1)


def _six_bits(stored: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return 8 scales and 8 minimums from 12 bytes; the first four of each are whole, the others in two."""
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
# These types are only named in a message.
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


_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_NESTED = 4  # Arrays may be nested so deep.
_ALIGNMENT = 32  # This is in bytes, for files without an alignment.


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int  # This is the offset in the file.

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        kind = BLOCK_TYPES[self.type_id]
        return self.num_values // kind.values * kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Gguf:
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]


def read_gguf(data: Any) -> Gguf:
    """Read the metadata and the tensors' places from a whole file's bytes, or from a map of it.

    It reads no tensor's values. Raises ConfigError where it is no GGUF file, has another version, is cut
    short, or has a tensor of an unsupported type.
    """
    reader = _Reader(data)
    try:
        return _read(reader, len(data))
    except struct.error as error:
        raise ConfigError("the GGUF file is cut short: its header goes on behind its end") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the GGUF file is damaged: a text in its header is no UTF-8 ({error})") from error


def floats_of(data: Any, tensor: Tensor) -> Floats:
    kind = BLOCK_TYPES[tensor.type_id]
    items = np.frombuffer(data, kind.dtype, tensor.num_values // kind.values, tensor.start)
    return kind.floats(items).reshape(tensor.shape)


class _Reader:
    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(f"<{code}")
        return value

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise struct.error
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY and depth < _MOST_NESTED:
            of, count = self.number("I"), self.number("Q")
            return self._numbers(of, count) if of in _SCALARS else self._list(of, count, depth)
        if kind not in _SCALARS:
            raise ConfigError(f"the GGUF file is damaged: its metadata has a value of type {kind}")
        return self.number(_SCALARS[kind])

    def _numbers(self, kind: int, count: int) -> list[Any]:
        code = f"<{_SCALARS[kind]}"
        return [value for (value,) in struct.iter_unpack(code, self.bytes(count * struct.calcsize(code)))]

    def _list(self, kind: int, count: int, depth: int) -> list[Any]:
        return [self.value(kind, depth + 1) for _ in range(count)]


def _read(reader: _Reader, num_bytes: int) -> Gguf:
    if reader.bytes(4) != b"GGUF":
        raise ConfigError("it is not a GGUF file: it does not begin with GGUF")
    version = reader.number("I")
    if version not in _VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        kind = "big-endian" if is_swapped else f"version {version}"
        raise ConfigError(f"the GGUF file is {kind}; read are versions 2 and 3, little-endian")
    num_tensors, num_pairs = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.text()
        metadata[key] = reader.value(reader.number("I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError("the GGUF file is one part of several; join them first (llama-gguf-split --merge)")
    stated = [_stated_tensor(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"the GGUF file is damaged: its general.alignment is {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    tensors = tuple(Tensor(name, shape, kind, start + offset) for name, shape, kind, offset in stated)
    for tensor in tensors:
        _check(tensor, num_bytes)
    return Gguf(metadata, tensors)


def _stated_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text()
    shape = tuple(reader.number("Q") for _ in range(reader.number("I")))
    return name, shape[::-1], reader.number("I"), reader.number("Q")


def _check(tensor: Tensor, num_bytes: int) -> None:
    if tensor.type_id not in BLOCK_TYPES:
        name = UNREAD_TYPES.get(tensor.type_id, f"number {tensor.type_id}")
        known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
        raise ConfigError(f"{tensor.name} of the GGUF file is of type {name}; read are {known}")
    if not tensor.shape or tensor.shape[-1] % BLOCK_TYPES[tensor.type_id].values:
        raise ConfigError(f"the GGUF file is damaged: {tensor.name} has rows that are no whole blocks")
    if tensor.start + tensor.num_bytes > num_bytes:
        raise ConfigError(f"the GGUF file is cut short: {tensor.name} ends behind its end")
