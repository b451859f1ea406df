"""Torch's own operations compute what the kernels do, and round at the same places.

Trials compare a definition with them, and they replace the kernels where there is no GPU.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh"]


class NormForm(NamedTuple):
    """All norms without a weight have the same form."""

    epsilon: float
    adds_one: bool  # It adds one to the weight.
    rounds_first: bool  # It rounds before the product with the weight.


class RotaryForm(NamedTuple):
    """The first `2 * half` numbers of a head are rotated; each half may have its own angles."""

    half: int
    has_own_angles: bool


class Normalize(Protocol):
    def __call__(self, rows: Tensor, weight: Tensor | None, form: NormForm) -> Tensor: ...


class AddAndNormalize(Protocol):
    def __call__(
        self, first: Tensor, second: Tensor, total: Tensor, weight: Tensor | None, form: NormForm
    ) -> Tensor: ...


class Rotate(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm
    ) -> tuple[Tensor, Tensor]: ...


class Activate(Protocol):
    def __call__(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor: ...


class Kernels(NamedTuple):
    normalize: Normalize
    rotate: Rotate
    activate: Activate
    add_and_normalize: AddAndNormalize | None = None


def normalize(rows: Tensor, weight: Tensor | None, form: NormForm) -> Tensor:
    """Divide each of `rows` [.., width] by its root mean square, and multiply it by the weight."""
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.epsilon)
    if form.rounds_first:
        normed = normed.to(rows.dtype).float()
    if weight is not None:
        normed = normed * (1.0 + weight.float() if form.adds_one else weight.float())
    return normed.to(rows.dtype)


def add_and_normalize(
    first: Tensor, second: Tensor, total: Tensor, weight: Tensor | None, form: NormForm
) -> Tensor:
    """Write the sum to `total`, rounded, and return its norm; all are contiguous."""
    return normalize(torch.add(first, second, out=total), weight, form)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> tuple[Tensor, Tensor]:
    """Rotate `query` [1, heads, total, dim] and `key` by the angles of `cos` and `sin` [1, total, ..]."""
    half = form.half
    second = slice(half, 2 * half) if form.has_own_angles else slice(half)
    angles = [each[:, None, :, halves] for halves in (slice(half), second) for each in (cos, sin)]
    return _rotated(query, angles), _rotated(key, angles)


def _rotated(heads: Tensor, angles: list[Tensor]) -> Tensor:
    cos, sin, second_cos, second_sin = angles
    half = cos.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
    turned = (first * cos + -second * sin, second * second_cos + first * second_sin, rest)
    return torch.cat(turned, -1)


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


PLAIN = Kernels(normalize, rotate, activate, add_and_normalize)
