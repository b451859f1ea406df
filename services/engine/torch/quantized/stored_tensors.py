"""This module finds a quantized checkpoint's weights by the names that a model's definition uses.

- X.weight with X.weight_scale, or .weight_scale_inv, is FP8, INT8 or MXFP8; the same holds for other tensors.
- X.weight_packed with X.weight_scale, .. is compressed-tensors of 4 bits, integer and float.
- X.qweight with X.qzeros and X.scales is AWQ or GPTQ, which differ in their shapes.
- X_blocks with X_scales is MXFP4, whose experts are transposed.

transformers reads each tensor when it needs it, so that few exist at a time. The same holds for the weights
of a GGUF file in the directory.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from services.engine.start_fault import start_fault
from services.engine.torch.quantized.dequantize import Grouped, four_bits, packed, packed_columns, scaled
from services.model.gguf import read_gguf
from services.model.gguf_model import Weight, weights_of
from services.model.quantization import Quantization
from services.settings.gguf_directory import mapped
from services.values.errors import ConfigError

# Numbers of these types need a scale.
_NUMBERS = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")
_SCALES = ("F32", "BF16", "F16")
# These belong to activations and KV, which are not quantized here, or repeat what a shape shows.
_UNUSED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".weight_shape",
)
# A tensor with such a suffix is no weight by itself, or changes a layer's output (AWQ's scales of an
# activation).
PARTS = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_packed",
    ".weight_g_idx",
    ".pre_quant_scale",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    "_blocks",
    "_scales",
)


class StoredTensor(Protocol):
    def __getitem__(self, index: Any) -> Tensor: ...

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Dequantized:
    """It is computed again at each access, as safetensors' own slices are read."""

    name: str
    parts: Mapping[str, StoredTensor]
    make: Callable[..., Tensor]
    dtype: torch.dtype
    num_dims: int = 2  # The first part has so many dimensions for a matrix, and one more for experts.
    take_apart: Callable[..., Grouped] | None = None  # It returns the parts as integers with scales.

    def grouped(self, device: torch.device) -> Grouped | None:
        """Return the integers with a scale for each group, or None for another format."""
        if self.take_apart is None:
            return None
        return self.take_apart(**{name: part[...].to(device) for name, part in self.parts.items()})

    def __getitem__(self, index: Any) -> Tensor:
        try:
            return self._whole()[index]
        except Exception as error:  # torch may raise any class where parts do not fit.
            raise start_fault(f"{self.name} cannot be made of its parts: {error}", error) from error

    def _whole(self) -> Tensor:
        read = {name: part[...] for name, part in self.parts.items()}
        first = next(iter(read.values()))
        if first.dim() == self.num_dims:
            return self.make(**read).to(self.dtype)
        made: Tensor | None = None
        # One expert is computed at a time, since all in float32 take much memory.
        for i in range(len(first)):
            own = {name: _of_expert(part, i, len(first)) for name, part in read.items()}
            matrix = self.make(**own)
            if made is None:
                made = torch.empty((len(first), *matrix.shape), dtype=self.dtype)
            made[i] = matrix
        assert made is not None
        return made


def _of_expert(part: Tensor, i: int, count: int) -> Tensor:
    return part[i] if part.numel() > 1 and len(part) == count else part


def float8_block(weight: Dequantized) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale of floats of 8 bits: a row, or 128 x 128.

    It is None for any other format.
    """
    if set(weight.parts) != {"numbers", "scale"} or weight.parts["numbers"].get_dtype() != "F8_E4M3":
        return None
    shape, scale = (weight.parts[part].get_shape() for part in ("numbers", "scale"))
    if len(shape) != 2 or weight.parts["scale"].get_dtype() not in _SCALES:
        return None
    if prod(scale) in (1, shape[0]) and (len(scale) < 2 or scale[-1] == 1):
        return (1, shape[1])
    return (128, 128) if scale == [-(-size // 128) for size in shape] else None


def open_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        opened = safe_open(file, "pt")
        tensors.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


def named_weights(
    tensors: Mapping[str, StoredTensor], quantization: Quantization | None, dtype: torch.dtype
) -> dict[str, StoredTensor | Dequantized]:
    """Return each weight by its name; one that is built from parts has `dtype`, and others keep theirs.

    Raises ConfigError where a part is missing, or the parts that numbers need.
    """
    found = _Found(tensors, quantization, dtype)
    weights: dict[str, StoredTensor | Dequantized] = {}
    for name in tensors:
        if (made := found.weight(name)) is not None:
            weights[made[0]] = made[1]
    for name, tensor in tensors.items():
        if name not in found.used and not name.endswith(_UNUSED):
            if tensor.get_dtype() in _NUMBERS:
                raise ConfigError(f"{name} is of {tensor.get_dtype()}, and nothing says what that means")
            weights[name] = tensor
    return weights


class _Found:
    def __init__(
        self, tensors: Mapping[str, StoredTensor], quantization: Quantization | None, dtype: torch.dtype
    ) -> None:
        self._tensors, self._dtype = tensors, dtype
        self._block = quantization.block if quantization else None
        self._zeros_less_one = quantization is not None and quantization.zeros_less_one
        self._has_zeros = quantization is not None and not quantization.symmetric
        self.used: set[str] = set()

    def weight(self, name: str) -> tuple[str, Dequantized] | None:
        for way in (self._scaled, self._packed, self._packed_columns, self._blocks):
            if (made := way(name)) is not None:
                return made
        return None

    def _scaled(self, name: str) -> tuple[str, Dequantized] | None:
        kind, optional = self._tensors[name].get_dtype(), ("_scale_2", "_zero_point")
        if kind not in _NUMBERS:
            return None
        parts = self._parts(name, ("_scale_inv",), optional) or self._parts(name, ("_scale",), optional)
        if parts is None:
            return None
        numbers, scale, more, zero = parts
        if kind == "U8":
            self._require_factor(f"{name}_scale_2", scale, more)
            return name, self._made(name, _four_bits, pairs=numbers, scale=scale, factor=more)
        if kind == "I8":
            self._require_zero(f"{name}_zero_point", zero)
        block = self._block

        def make(numbers: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
            return scaled(numbers, scale, zero, block)

        return name, self._made(name, make, numbers=numbers, scale=scale, zero=zero)

    def _packed(self, name: str) -> tuple[str, Dequantized] | None:
        base = name.removesuffix("_packed")
        optional = ("_zero_point", "_g_idx", "_global_scale", "_shape")
        if (
            base == name
            or (parts := self._parts(base, ("_packed", "_scale"), optional, has_own=False)) is None
        ):
            return None
        words, scale, zero, groups, common, shape = parts
        assert words is not None
        if words.get_dtype() == "U8":
            self._require_factor(f"{base}_global_scale", scale, common)
            return base, self._made(base, _four_bits, pairs=words, scale=scale, divisor=common)
        if shape is None:
            raise ConfigError(f"{name} has no {base}_shape")
        self._require_zero(f"{base}_zero_point", zero)
        own = {"words": words, "scale": scale, "zero": zero, "groups": groups, "shape": shape}
        return base, self._of_groups(base, _packed, **own)

    def _packed_columns(self, name: str) -> tuple[str, Dequantized] | None:
        base = name.removesuffix(".qweight")
        if base == name:
            return None
        parts = self._parts(base, (".qweight", ".qzeros", ".scales"), (".g_idx",), has_own=False)
        if parts is None:
            return None
        words, zeros, scale, groups = parts
        less_one = self._zeros_less_one

        def take_apart(words: Tensor, zeros: Tensor, scale: Tensor, groups: Tensor | None = None) -> Grouped:
            return packed_columns(words, zeros, scale, groups, less_one)

        name = f"{base}.weight"
        made = self._of_groups(name, take_apart, words=words, zeros=zeros, scale=scale, groups=groups)
        return name, made

    def _blocks(self, name: str) -> tuple[str, Dequantized] | None:
        base = name.removesuffix("_blocks")
        if base == name or (parts := self._parts(base, ("_blocks", "_scales"), (), has_own=False)) is None:
            return None
        return base, self._made(base, _of_blocks, num_dims=3, blocks=parts[0], scale=parts[1])

    def _require_zero(self, name: str, zero: StoredTensor | None) -> None:
        if self._has_zeros and zero is None:
            raise ConfigError(f"weights are quantized asymmetrically, and there is no {name}")

    def _require_factor(self, name: str, scale: StoredTensor | None, factor: StoredTensor | None) -> None:
        """Refuse NVFP4, whose scales are floats, without its scale of all blocks; MXFP4 has exponents."""
        if scale is not None and scale.get_dtype() == "F8_E4M3" and factor is None:
            raise ConfigError(f"scales of 8 bits need one of all blocks more, and there is no {name}")

    def _made(
        self, name: str, make: Callable[..., Tensor], num_dims: int = 2, **parts: StoredTensor | None
    ) -> Dequantized:
        some = {part: stored for part, stored in parts.items() if stored is not None}
        return Dequantized(name, some, make, self._dtype, num_dims)

    def _of_groups(
        self, name: str, take_apart: Callable[..., Grouped], **parts: StoredTensor | None
    ) -> Dequantized:
        made = self._made(name, lambda **own: take_apart(**own).floats(), 2, **parts)
        return replace(made, take_apart=take_apart)

    def _parts(
        self, base: str, needed: tuple[str, ...], optional: tuple[str, ...], has_own: bool = True
    ) -> list[StoredTensor | None] | None:
        """Return the tensors named `base` plus each suffix, or None where a needed one is missing."""
        names = [base, *(base + suffix for suffix in needed)] if has_own else [base + each for each in needed]
        if any(name not in self._tensors for name in names):
            return None
        also = [base + suffix for suffix in optional]
        self.used.update(names, also)
        return [self._tensors.get(name) for name in (*names, *also)]


def _four_bits(
    pairs: Tensor, scale: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None
) -> Tensor:
    """Compute four_bits; NVFP4 has one more scale, which multiplies or divides those of the blocks."""
    if factor is not None:
        scale = scale.float() * factor.float()
    if divisor is not None:
        scale = scale.float() / divisor.float()
    return four_bits(pairs, scale)


def _packed(
    words: Tensor, scale: Tensor, shape: Tensor, zero: Tensor | None = None, groups: Tensor | None = None
) -> Grouped:
    if groups is not None and bool((groups == -1).all()):
        groups = None  # The groups were never assigned, so columns are in order.
    if shape.numel() < 2 or int(shape[-2]) != words.shape[-2]:
        raise ConfigError(f"numbers of {words.shape[-2]} rows are stated to be of shape {shape.tolist()}")
    return packed(words, scale, int(shape[-1]), zero, groups)


def _of_blocks(blocks: Tensor, scale: Tensor) -> Tensor:
    return four_bits(blocks.flatten(-2), scale).transpose(-1, -2).contiguous()


_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class GgufWeight:
    weight: Weight
    data: mmap.mmap

    def __getitem__(self, index: Any) -> Tensor:
        return torch.from_numpy(self.weight.floats(self.data))[index]


def gguf_weights(file: Path) -> dict[str, GgufWeight]:
    """Return the weights by their names in transformers. Raises ConfigError where the file is damaged."""
    data = mapped(file)
    return {weight.name: GgufWeight(weight, data) for weight in weights_of(read_gguf(data))}


def sampled_gguf(file: Path) -> Iterator[bytes]:
    """Yield the header, and the first and middle 4 KiB of each tensor.

    Raises ConfigError where the file is damaged.
    """
    with mapped(file) as data:
        tensors = read_gguf(data).tensors
        yield data[: min((tensor.start for tensor in tensors), default=len(data))]
        for tensor in sorted(tensors, key=lambda tensor: tensor.name):
            end = tensor.start + tensor.num_bytes
            for begin in sorted({tensor.start, (tensor.start + end) // 2}):
                yield data[begin : min(begin + _SAMPLE_BYTES, end)]
