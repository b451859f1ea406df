"""A GGUF file is read here: its metadata, its tensors, and their values as float32.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian; the blocks of quantized values are
those of ggml-common.h. `_TYPES` has the types that are read.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.values.errors import ConfigError

Floats = NDArray[np.float32]

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_NESTED = 4  # arrays may be nested so deep
_ALIGNMENT = 32  # bytes, where the file names no alignment
_BLOCK = 32  # values that share a scale

# Only a message names these types.
_UNREAD_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    28: "F64",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int  # in the file

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        kind = _TYPES[self.type_id]
        return self.num_values // kind.values * kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Gguf:
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    values: int  # in one item of `dtype`
    dtype: np.dtype[Any]
    floats: Callable[[NDArray[Any]], Floats]  # of items, in the order of the values


def read_gguf(data: Any) -> Gguf:
    """Read metadata and tensors' places of a whole file's bytes, or of a map of it.

    No tensor's values are read.

    Raises:
        ConfigError: it is no GGUF file, of another version, cut short, or has a tensor of a type not read.
    """
    reader = _Reader(data)
    try:
        return _read(reader, len(data))
    except struct.error as error:
        raise ConfigError("the GGUF file is cut short: its header goes on behind its end") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the GGUF file is damaged: a text in its header is no UTF-8 ({error})") from error


def floats_of(data: Any, tensor: Tensor) -> Floats:
    kind = _TYPES[tensor.type_id]
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
        said = "big-endian" if is_swapped else f"version {version}"
        raise ConfigError(f"the GGUF file is {said}; read are versions 2 and 3, little-endian")
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
    if tensor.type_id not in _TYPES:
        name = _UNREAD_TYPES.get(tensor.type_id, f"number {tensor.type_id}")
        known = ", ".join(kind.name for kind in _TYPES.values())
        raise ConfigError(f"{tensor.name} of the GGUF file is of type {name}; read are {known}")
    if not tensor.shape or tensor.shape[-1] % _TYPES[tensor.type_id].values:
        raise ConfigError(f"the GGUF file is damaged: {tensor.name} has rows that are no whole blocks")
    if tensor.start + tensor.num_bytes > num_bytes:
        raise ConfigError(f"the GGUF file is cut short: {tensor.name} ends behind its end")


def _plain(items: NDArray[Any]) -> Floats:
    return items.astype(np.float32)


def _bfloat16(items: NDArray[Any]) -> Floats:
    return (items.astype(np.uint32) << 16).view(np.float32)


def _nibbles(items: NDArray[Any]) -> Floats:
    """The low halves of a block's 16 bytes are its first 16 values, the high halves its last."""
    return np.concatenate([items & 15, items >> 4], axis=1).astype(np.float32)


def _column(numbers: NDArray[Any]) -> Floats:
    return numbers.astype(np.float32)[:, None]


def _q4_0(items: NDArray[Any]) -> Floats:
    return (_nibbles(items["values"]) - 8) * _column(items["scale"])


def _q4_1(items: NDArray[Any]) -> Floats:
    return _nibbles(items["values"]) * _column(items["scale"]) + _column(items["least"])


def _q8_0(items: NDArray[Any]) -> Floats:
    return items["values"].astype(np.float32) * _column(items["scale"])


_HALF: tuple[str, str] = ("scale", "<f2")
_TYPES = {
    0: _Type("F32", 1, np.dtype("<f4"), _plain),
    1: _Type("F16", 1, np.dtype("<f2"), _plain),
    30: _Type("BF16", 1, np.dtype("<u2"), _bfloat16),
    2: _Type("Q4_0", _BLOCK, np.dtype([_HALF, ("values", "u1", (16,))]), _q4_0),
    3: _Type("Q4_1", _BLOCK, np.dtype([_HALF, ("least", "<f2"), ("values", "u1", (16,))]), _q4_1),
    8: _Type("Q8_0", _BLOCK, np.dtype([_HALF, ("values", "i1", (32,))]), _q8_0),
}
