"""This module defines the layout of a pool's numbers, and how attention computes its scores."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# This is the largest number of float8_e4m3fn; larger numbers are stored as this one.
_MOST_FLOAT8 = 448.0


class PageShape(NamedTuple):
    """A page is, for each layer, K [num_kv_heads, page_size, head_dim], then V [.., .., v_head_dim].

    A latent (of DeepSeek-V3, from which keys and values are computed) has one KV head and v_head_dim 0.
    """

    num_layers: int
    num_kv_heads: int
    page_size: int  # This is in tokens.
    head_dim: int
    v_head_dim: int

    @property
    def layer_numbers(self) -> int:
        return self.num_kv_heads * self.page_size * (self.head_dim + self.v_head_dim)

    @property
    def page_numbers(self) -> int:
        return self.num_layers * self.layer_numbers


@dataclass(frozen=True, slots=True)
class PagedKv:
    """Pages lie one after the other: `numbers` is [num_pages * shape.page_numbers], contiguous.

    Their type may be smaller than the model's. Then numbers are rounded when they are stored, and widened
    when they are read.
    """

    numbers: Tensor
    shape: PageShape
    # This is the type that the model computes in; None means that of `numbers`.
    widened: torch.dtype | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.widened or self.numbers.dtype

    _layers: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_pages(self) -> int:
        return len(self.numbers) // self.shape.page_numbers

    @property
    def is_latent(self) -> bool:
        return self.shape.v_head_dim == 0

    def rounded(self, numbers: Tensor) -> Tensor:
        if self.widened is None:
            return numbers
        return numbers.clamp(-_MOST_FLOAT8, _MOST_FLOAT8).to(self.numbers.dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer: views [num_pages, num_kv_heads, page_size, head_dim or v_head_dim]."""
        if (known := self._layers.get(index)) is not None:
            return known
        _, num_kv_heads, page_size, head_dim, v_head_dim = self.shape
        keys_at = self.numbers.storage_offset() + index * self.shape.layer_numbers
        values_at = keys_at + num_kv_heads * page_size * head_dim
        views = self._layers[index] = self._heads(head_dim, keys_at), self._heads(v_head_dim, values_at)
        return views

    def _heads(self, head_dim: int, first: int) -> Tensor:
        _, num_kv_heads, page_size, _, _ = self.shape
        strides = (self.shape.page_numbers, page_size * head_dim, head_dim, 1)
        return self.numbers.as_strided((self.num_pages, num_kv_heads, page_size, head_dim), strides, first)


@dataclass(frozen=True, slots=True)
class Scores:
    """A score is query * key * scaling, then, with a soft cap c, tanh(score / c) * c; then comes the mask.

    A head's sink is one more score in the softmax without a value: it only takes weight from the others.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None  # The shape is [num_heads].

    @property
    def are_plain(self) -> bool:
        return self.softcap is None and self.sinks is None
