"""Rotations of q and k are known by trying the function that a definition calls, whatever its names are.

A module's forward is made anew, with another function in that one's place. What the other does not take, or
what its trial has not seen, the definition's own computes.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.torch.model.activations import with_globals
from services.engine.torch.model.fused import plain
from services.engine.torch.model.fused.fused import Fused
from services.engine.torch.model.fused.plain import RotaryForm, Rotate
from services.engine.torch.model.fused.trials import MOST_UNLIKE, unlike

Rotation = Callable[..., Any]
# Heads have 16 numbers. With 16 angles all are rotated; with 8, the first half, or all with angles shared by
# both halves.
_DIM, _TOKENS, _NUM_HEADS, _NUM_KV_HEADS = 16, 5, 6, 2


@dataclass(frozen=True, slots=True)
class _Known:
    """A function is known by the angles that it takes."""

    takes_all: bool  # as many as a head has numbers
    # With fewer, whether it rotates as many numbers alone, or all with angles that both halves share. None
    # means that it is not known.
    of_fewer: bool | None

    def form_for(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> RotaryForm | None:
        if query.dim() != 4 or cos.dim() != 3 or len(query) != 1 or cos.shape != sin.shape:
            return None
        tokens_and_dim = (query.shape[2], query.shape[3])
        if key.dim() != 4 or len(key) != 1 or (key.shape[2], key.shape[3]) != tokens_and_dim:
            return None
        if cos.shape[:2] != (1, query.shape[2]) or len({query.dtype, key.dtype, cos.dtype, sin.dtype}) > 1:
            return None
        return self.form_of(query.shape[3], cos.shape[2])

    def form_of(self, dim: int, num_angles: int) -> RotaryForm | None:
        if num_angles == dim:
            return RotaryForm(dim // 2, True) if self.takes_all and dim % 2 == 0 else None
        if self.of_fewer and num_angles < dim and num_angles % 2 == 0:
            return RotaryForm(num_angles // 2, True)
        return RotaryForm(dim // 2, False) if self.of_fewer is False and 2 * num_angles == dim else None


def fuse_rotations(model: PreTrainedModel, fused: Fused, rotate: Rotate) -> None:
    replaced: dict[Rotation, Rotation | None] = {}
    forwards: dict[Rotation, FunctionType | None] = {}
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module):
            continue
        if forward not in forwards:
            forwards[forward] = _remade(forward, replaced, model, fused, rotate)
        if (remade := forwards[forward]) is not None:
            module.forward = MethodType(remade, module)
            fused.num_rotations += 1


def _remade(
    forward: Any, replaced: dict[Rotation, Rotation | None], model: nn.Module, fused: Fused, rotate: Rotate
) -> FunctionType | None:
    unwrapped = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType) or not isinstance(unwrapped, FunctionType):
        return None
    others = {}
    for name in unwrapped.__code__.co_names:
        function = unwrapped.__globals__.get(name)
        if not isinstance(function, FunctionType) or not _may_rotate(function):
            continue
        if function not in replaced:
            replaced[function] = _replacement(function, model, fused, rotate)
        if (other := replaced[function]) is not None:
            others[name] = other
    return with_globals(forward, **others) if others else None


def _may_rotate(function: FunctionType) -> bool:
    return _takes_both(function) or _takes_one(function)


def _takes_both(function: Rotation) -> bool:
    return list(inspect.signature(function).parameters)[:4] == ["q", "k", "cos", "sin"]


def _takes_one(function: Rotation) -> bool:
    parameters = inspect.signature(function).parameters
    return (
        list(parameters) == ["x", "cos", "sin", "unsqueeze_dim"] and parameters["unsqueeze_dim"].default == 1
    )


def _replacement(function: Rotation, model: Any, fused: Fused, rotate: Rotate) -> Rotation | None:
    trial = _Trial(function if _takes_both(function) else _of_both(function), model.dtype, model.device)
    of_fewer = next((own for own in (True, False) if trial.agrees(_few(own), plain.rotate)), None)
    known = _Known(trial.agrees(_ALL, plain.rotate), of_fewer)
    forms = [_ALL] * known.takes_all + [_few(own) for own in (True, False) if own is of_fewer]
    if not forms or not all(trial.agrees(form, rotate) for form in forms):
        return None
    return (_rotation_of_both if _takes_both(function) else _rotation_of_one)(function, known, fused, rotate)


def _rotation_of_both(function: Rotation, known: _Known, fused: Fused, rotate: Rotate) -> Rotation:
    @wraps(function)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        if fused.is_on and not others and not named:
            form = known.form_for(q, k, cos, sin)
            if form is not None:
                return rotate(q, k, cos, sin, form)
        return function(q, k, cos, sin, *others, **named)

    return rotated


def _rotation_of_one(function: Rotation, known: _Known, fused: Fused, rotate: Rotate) -> Rotation:
    @wraps(function)
    def rotated(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if fused.is_on and x.dim() == 4 and unsqueeze_dim in (1, 2):
            heads = x if unsqueeze_dim == 1 else x.transpose(1, 2)
            none = heads[:, :0]
            form = known.form_for(heads, none, cos, sin)
            if form is not None:
                turned, _ = rotate(heads, none, cos, sin, form)
                return turned if unsqueeze_dim == 1 else turned.transpose(1, 2)
        return function(x, cos, sin, unsqueeze_dim)

    return rotated


def _of_both(function: Rotation) -> Rotation:
    """Return a rotation of both by one of each, of heads before tokens and of tokens before heads."""

    def of_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return function(q, cos, sin), function(k.transpose(1, 2), cos, sin, unsqueeze_dim=2).transpose(1, 2)

    return of_both


_ALL = RotaryForm(_DIM // 2, True)


def _few(have_own: bool) -> RotaryForm:
    return RotaryForm(_DIM // 4, True) if have_own else RotaryForm(_DIM // 2, False)


class _Trial:
    def __init__(self, function: Rotation, dtype: torch.dtype, device: torch.device) -> None:
        self._function = function
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        # As they come of a product: what is between the heads of a token is another's.
        states = random(1, _TOKENS, 2 * (_NUM_HEADS + _NUM_KV_HEADS), _DIM).transpose(1, 2)
        self._query, self._key = states[:, :_NUM_HEADS], states[:, _NUM_HEADS : _NUM_HEADS + _NUM_KV_HEADS]
        self._angles = {count: (random(1, _TOKENS, count), random(1, _TOKENS, count)) for count in (8, 16)}

    def agrees(self, form: RotaryForm, rotate: Rotate) -> bool:
        angles = self._angles[2 * form.half if form.has_own_angles else form.half]
        try:
            expected = self._function(self._query, self._key, *angles)
        except Exception:  # it may raise any where it takes other angles
            return False
        given = rotate(self._query, self._key, *angles, form)
        return len(expected) == 2 and all(
            unlike(mine, theirs) <= MOST_UNLIKE for mine, theirs in zip(given, expected, strict=True)
        )
