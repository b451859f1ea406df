"""The weights of a GGUF file that lies in a checkpoint's directory; each is made when it is asked for."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.model.gguf import read_gguf
from services.model.gguf_model import Weight, weights_of
from services.settings.gguf_directory import mapped

_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class GgufWeight:
    weight: Weight
    data: mmap.mmap

    def __getitem__(self, index: Any) -> Tensor:
        return torch.from_numpy(self.weight.floats(self.data))[index]


def gguf_weights(file: Path) -> dict[str, GgufWeight]:
    """Return the weights by their names in transformers. Raises ConfigError."""
    data = mapped(file)
    return {weight.name: GgufWeight(weight, data) for weight in weights_of(read_gguf(data))}


def sampled_gguf(file: Path) -> Iterator[bytes]:
    """Yield the header, and the first and middle 4 KiB of each tensor. Raises ConfigError."""
    with mapped(file) as data:
        tensors = read_gguf(data).tensors
        yield data[: min((tensor.start for tensor in tensors), default=len(data))]
        for tensor in sorted(tensors, key=lambda tensor: tensor.name):
            end = tensor.start + tensor.num_bytes
            for begin in sorted({tensor.start, (tensor.start + end) // 2}):
                yield data[begin : min(begin + _SAMPLE_BYTES, end)]
