"""A GGUF file is read here: its metadata, its tensors, and their values as float32.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from services.model.gguf_blocks import BLOCK_TYPES, UNREAD_TYPES, Floats
from services.values.errors import ConfigError

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_NESTED = 4  # arrays may be nested so deep
_ALIGNMENT = 32  # bytes, where the file names no alignment


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
        kind = BLOCK_TYPES[self.type_id]
        return self.num_values // kind.values * kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Gguf:
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]


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
    if tensor.type_id not in BLOCK_TYPES:
        name = UNREAD_TYPES.get(tensor.type_id, f"number {tensor.type_id}")
        known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
        raise ConfigError(f"{tensor.name} of the GGUF file is of type {name}; read are {known}")
    if not tensor.shape or tensor.shape[-1] % BLOCK_TYPES[tensor.type_id].values:
        raise ConfigError(f"the GGUF file is damaged: {tensor.name} has rows that are no whole blocks")
    if tensor.start + tensor.num_bytes > num_bytes:
        raise ConfigError(f"the GGUF file is cut short: {tensor.name} ends behind its end")
