"""Norms, rotations and activations are recognized by trying them, whatever their names, and fused.

A norm's results for random rows show how it uses its weight.

A rotation of q and k is a function that a definition calls. A module's forward is copied with another
function in its place. Inputs that the other does not support, or that were not tried, go to the definition's
own.

In an MLP like Llama's, one kernel computes the activated gate times the other product. The instructions of
its forward identify the MLP, and a trial identifies its activation.

Two computations are compared by their results for random numbers.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.torch.model.activations import with_globals
from services.engine.torch.model.fused import plain_kernels
from services.engine.torch.model.fused.plain_kernels import (
    Activate,
    Activation,
    AddAndNormalize,
    Normalize,
    NormForm,
    RotaryForm,
    Rotate,
)
from services.engine.torch.model.fused.products import Fused

logger = logging.getLogger(__name__)

# In half precision a right computation rounds one in a hundred numbers differently, and one that rounds at
# other places one in three.
MOST_UNLIKE = 0.05


def unlike(given: object, expected: Tensor) -> float:
    """Return the share of numbers that differ, or 1 where they differ by more than rounding."""
    if not isinstance(given, Tensor) or given.shape != expected.shape or given.dtype != expected.dtype:
        return 1.0
    if expected.dtype == torch.float32:
        return float(not torch.allclose(given, expected, rtol=1e-5, atol=1e-6))
    step = 2 * torch.finfo(expected.dtype).eps
    if not torch.allclose(given.float(), expected.float(), rtol=step, atol=1e-6):
        return 1.0
    return float((given != expected).float().mean())


_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_SCALES = (1e-3, 1.0, 50.0)  # With the smallest one the epsilon affects the result.
_NORM_WIDTH = 48  # A norm without a weight is tried with this width.


def fuse_norms(
    model: PreTrainedModel, fused: Fused, normalize: Normalize, adds: AddAndNormalize | None = None
) -> None:
    for module in model.modules():
        epsilon = _epsilon_of(module)
        if epsilon is None:
            continue
        form = _form_of(module, epsilon, model, normalize)
        if form is not None:
            weight = next(module.parameters(recurse=False), None)
            alike = adds if adds is not None and _adds_alike(weight, form, model, normalize, adds) else None
            _replace_norm(module, form, model.dtype, fused, normalize, alike)
            fused.num_norms += 1
            fused.adds |= alike is not None


def _adds_alike(
    weight: Tensor | None, form: NormForm, model: PreTrainedModel, normalize: Normalize, adds: AddAndNormalize
) -> bool:
    """Return whether sums have torch's bits, and their norms are those of norms alone."""
    for first in _random_rows(weight, model):
        second = first.flip(1) / 3
        total = torch.empty_like(first)
        try:
            normed = adds(first, second, total, weight, form)
        except Exception as error:  # Triton or a compiler may raise anything.
            logger.warning("fused_kernels_unusable of=sums error=%r", error)
            return False
        is_right = torch.equal(total, first + second)
        if not is_right or unlike(normed, normalize(total, weight, form)) > MOST_UNLIKE:
            return False
    return True


def _epsilon_of(module: nn.Module) -> float | None:
    """Return an attribute that may be a norm's epsilon, unless the rest of the module is no norm's."""
    weights = list(module.parameters(recurse=False))
    if len(weights) > 1 or any(each.dim() != 1 for each in weights):
        return None
    if list(module.children()) or list(module.buffers(recurse=False)):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # A norm takes only rows.
        return None
    return next((found for name in _EPSILONS if isinstance(found := vars(module).get(name), float)), None)


def _form_of(
    module: nn.Module, epsilon: float, model: PreTrainedModel, normalize: Normalize
) -> NormForm | None:
    with _random_weight(module) as weight:
        try:
            tried = [(rows, module(rows)) for rows in _random_rows(weight, model)]
        except Exception:  # A module that is no norm may raise any exception.
            return None

        def share(form: NormForm, way: Normalize) -> float:
            return max(unlike(given, way(rows, weight, form)) for rows, given in tried)

        ways = ((False, True), (False, False), (True, False), (True, True))
        forms = [NormForm(epsilon, *way) for way in (ways if weight is not None else ways[:1])]
        form = min(forms, key=lambda each: share(each, plain_kernels.normalize))
        is_known = share(form, plain_kernels.normalize) <= MOST_UNLIKE
        return form if is_known and share(form, normalize) <= MOST_UNLIKE else None


def _random_rows(weight: Tensor | None, model: PreTrainedModel) -> Iterator[Tensor]:
    width = _NORM_WIDTH if weight is None else len(weight)
    generator = torch.Generator().manual_seed(0)
    for scale in _SCALES:
        yield (scale * torch.randn(1, 7, width, generator=generator)).to(model.device, model.dtype)


@contextmanager
def _random_weight(module: nn.Module) -> Iterator[Tensor | None]:
    """Use a random weight meanwhile, since weights of ones would hide how they are used."""
    weight = next(module.parameters(recurse=False), None)
    if weight is None:
        yield None
        return
    own = weight.clone()
    weight.copy_(torch.randn(len(own), generator=torch.Generator().manual_seed(1)))
    try:
        yield weight
    finally:
        weight.copy_(own)


def _replace_norm(
    module: nn.Module,
    form: NormForm,
    tried: torch.dtype,
    fused: Fused,
    normalize: Normalize,
    adds: AddAndNormalize | None,
) -> None:
    original: Callable[..., Any] = module.forward
    weight = next(module.parameters(recurse=False), None)
    # Some weights are float32 in a model of another type, and the self-check widens all of them.
    weight_dtype = None if weight is None else weight.dtype

    def forward(*rows: Tensor, **named: Tensor) -> Any:
        if fused.is_on and not named:
            dtypes = (rows[0].dtype, None if weight is None else weight.dtype)
            if dtypes == (tried, weight_dtype) or set(dtypes) <= {torch.float32, None}:
                if adds is not None and fused.residuals is not None:
                    waiting = fused.residuals.take(rows[0])
                    if waiting is not None:
                        return adds(*waiting, weight, form)
                return normalize(rows[0], weight, form)
        return original(*rows, **named)

    module.forward = forward


Rotation = Callable[..., Any]
# Heads have 16 numbers. With 16 angles all are rotated; with 8 angles, the first half, or all with angles
# that both halves share.
_DIM, _TOKENS, _NUM_HEADS, _NUM_KV_HEADS = 16, 5, 6, 2


@dataclass(frozen=True, slots=True)
class _Known:
    takes_all: bool  # It takes as many angles as a head has numbers.
    # With fewer angles, True means that it rotates only as many numbers, and False that both halves share the
    # angles. None means that it is not known.
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
    of_fewer = next((own for own in (True, False) if trial.agrees(_few(own), plain_kernels.rotate)), None)
    known = _Known(trial.agrees(_ALL, plain_kernels.rotate), of_fewer)
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
    """Return a rotation of both by one of each, with heads before tokens and with tokens before heads."""

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

        # They lie as in a product's output, where other columns lie between the heads of two tokens.
        states = random(1, _TOKENS, 2 * (_NUM_HEADS + _NUM_KV_HEADS), _DIM).transpose(1, 2)
        self._query, self._key = states[:, :_NUM_HEADS], states[:, _NUM_HEADS : _NUM_HEADS + _NUM_KV_HEADS]
        self._angles = {count: (random(1, _TOKENS, count), random(1, _TOKENS, count)) for count in (8, 16)}

    def agrees(self, form: RotaryForm, rotate: Rotate) -> bool:
        angles = self._angles[2 * form.half if form.has_own_angles else form.half]
        try:
            expected = self._function(self._query, self._key, *angles)
        except Exception:  # It may raise any exception where it takes other angles.
            return False
        given = rotate(self._query, self._key, *angles, form)
        return len(expected) == 2 and all(
            unlike(mine, theirs) <= MOST_UNLIKE for mine, theirs in zip(given, expected, strict=True)
        )


_GATE_WIDTH, _GATE_ROWS = 1040, 5  # This is wider than what a program of the kernel computes.
_FARTHER, _MOST_UNLIKE_FAR = 16, 0.5


def _returned(self: Any, x: Tensor) -> Any:
    return self.down(self.activation(self.gate(x)) * self.up(x))


def _named_and_returned(self: Any, x: Tensor) -> Any:
    down = self.down(self.activation(self.gate(x)) * self.up(x))
    return down


class _Parts(NamedTuple):
    """The parts are in the order in which a forward names them."""

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
            _replace_mlp(module, parts, activation, fused, activate)
            fused.num_activations += 1


def _parts_of(module: nn.Module) -> _Parts | None:
    code = getattr(type(module).forward, "__code__", None)  # A decorator's code differs.
    if code is None or "forward" in vars(module):
        return None
    if not any(_is_alike(code, each.__code__) for each in (_returned, _named_and_returned)):
        return None
    parts = _Parts(*(getattr(module, name) for name in code.co_names))
    are_linear = all(isinstance(each, nn.Linear) for each in (parts.down, parts.gate, parts.up))
    return parts if are_linear and callable(parts.activation) else None


def _is_alike(code: CodeType, other: CodeType) -> bool:
    """Return whether the instructions are equal without names; `other` has no constants."""
    counts = [(len(each.co_names), each.co_argcount, each.co_nlocals) for each in (code, other)]
    return code.co_code == other.co_code and counts[0] == counts[1]


def _activation_of(
    function: Callable[[Tensor], Tensor], model: PreTrainedModel, activate: Activate
) -> Activation | None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1, _GATE_ROWS, 2 * _GATE_WIDTH, generator=generator)
    gate, up = numbers.to(model.device, model.dtype).split(_GATE_WIDTH, -1)
    # Some activations bound large numbers. GELU's tail is a difference of nearly equal numbers, so more of it
    # rounds differently.
    far = _FARTHER * gate
    tried = ((gate, function(gate) * up, MOST_UNLIKE), (far, function(far) * up, _MOST_UNLIKE_FAR))
    for activation in get_args(Activation):
        if all(
            unlike(way(numbers, up, activation), expected) <= most
            for way in (plain_kernels.activate, activate)
            for numbers, expected, most in tried
        ):
            known: Activation = activation
            return known
    return None


def _replace_mlp(
    module: nn.Module, parts: _Parts, activation: Activation, fused: Fused, activate: Activate
) -> None:
    original: Callable[..., Any] = module.forward

    def forward(*given: Tensor, **named: Any) -> Any:
        if not fused.is_on or named:
            return original(*given, **named)
        # No variable holds gate and up while `down` is computed.
        return parts.down(activate(parts.gate(given[0]), parts.up(given[0]), activation))

    module.forward = forward
