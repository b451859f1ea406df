"""An MLP like Llama's multiplies an activated gate by another product: one kernel does it.

It is known by the instructions of its forward, whatever its layers are named, and its activation by trying
it.
"""

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.torch.model.fused import plain
from services.engine.torch.model.fused.fused import Fused
from services.engine.torch.model.fused.plain import Activate, Activation
from services.engine.torch.model.fused.trials import MOST_UNLIKE, unlike

_WIDTH, _ROWS = 1040, 5  # wider than what a program of the kernel computes
_FARTHER, _MOST_UNLIKE_FAR = 16, 0.5


def _returned(self: Any, x: Tensor) -> Any:
    return self.down(self.activation(self.gate(x)) * self.up(x))


def _named_and_returned(self: Any, x: Tensor) -> Any:
    down = self.down(self.activation(self.gate(x)) * self.up(x))
    return down


class _Parts(NamedTuple):
    """The parts stand in the order in which a forward names them."""

    down: Any
    activation: Any
    gate: Any
    up: Any


def fuse_activations(model: PreTrainedModel, fused: Fused, activate: Activate) -> None:
    for module in model.modules():
        parts = _parts_of(module)
        if parts is None:
            continue
        activation = _activation_of(parts.activation, model, activate)
        if activation is not None:
            _replace(module, parts, activation, fused, activate)
            fused.num_activations += 1


def _parts_of(module: nn.Module) -> _Parts | None:
    code = getattr(type(module).forward, "__code__", None)  # A decorator's is another.
    if code is None or "forward" in vars(module):
        return None
    if not any(_is_alike(code, each.__code__) for each in (_returned, _named_and_returned)):
        return None
    parts = _Parts(*(getattr(module, name) for name in code.co_names))
    are_linear = all(isinstance(each, nn.Linear) for each in (parts.down, parts.gate, parts.up))
    return parts if are_linear and callable(parts.activation) else None


def _is_alike(code: CodeType, other: CodeType) -> bool:
    """Return whether the instructions are the same but for names; the other one has no constants."""
    counts = [(len(each.co_names), each.co_argcount, each.co_nlocals) for each in (code, other)]
    return code.co_code == other.co_code and counts[0] == counts[1]


def _activation_of(
    function: Callable[[Tensor], Tensor], model: PreTrainedModel, activate: Activate
) -> Activation | None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1, _ROWS, 2 * _WIDTH, generator=generator)
    gate, up = numbers.to(model.device, model.dtype).split(_WIDTH, -1)
    # Some bound large numbers. GELU's tail is what nearly equal ones leave, so more of it rounds otherwise.
    far = _FARTHER * gate
    tried = ((gate, function(gate) * up, MOST_UNLIKE), (far, function(far) * up, _MOST_UNLIKE_FAR))
    for activation in get_args(Activation):
        if all(
            unlike(way(numbers, up, activation), expected) <= most
            for way in (plain.activate, activate)
            for numbers, expected, most in tried
        ):
            known: Activation = activation
            return known
    return None


def _replace(
    module: nn.Module, parts: _Parts, activation: Activation, fused: Fused, activate: Activate
) -> None:
    original: Callable[..., Any] = module.forward

    def forward(*given: Tensor, **named: Any) -> Any:
        if not fused.is_on or named:
            return original(*given, **named)
        # Gate and up are held by nobody while `down` is computed.
        return parts.down(activate(parts.gate(given[0]), parts.up(given[0]), activation))

    module.forward = forward
