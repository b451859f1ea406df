"""Activations give a number the same bits on a CPU wherever it stands among other numbers.

torch computes most numbers of a tensor as vectors. At the end of each thread's share it computes the rest one
by one, with another formula, which differs in the last bit. The number of rows of a step decides which
numbers these are, but it must not change a token's result. So tensors are padded until nothing is left over.
"""

import inspect
from collections.abc import Callable
from functools import update_wrapper, wraps
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Activation = Callable[..., Tensor]

# torch computes so many numbers at once: two of the widest vectors, of 16-bit numbers.
_STEP = 64
# torch gives a thread no fewer numbers (at::internal::GRAIN_SIZE).
_LEAST_SHARE = 32768
_NAMES = frozenset({"gelu", "sigmoid", "silu", "softplus"})
_MODULES = (nn.GELU, nn.Sigmoid, nn.SiLU, nn.Softplus)


def even(activation: Activation) -> Activation:
    """Return an activation with the same results, except in the last bit of some numbers."""

    @wraps(activation)
    def filled_up(input: Tensor, *args: Any, **settings: Any) -> Tensor:
        size, shape = input.numel(), input.shape
        extra = even_size(size, torch.get_num_threads()) - size
        if not extra and input.is_contiguous():  # Otherwise each row is computed by itself.
            return activation(input, *args, **settings)
        filled = functional.pad(input.reshape(-1), (0, extra))
        return activation(filled, *args, **settings)[:size].view(shape)

    return filled_up


def even_size(size: int, num_threads: int) -> int:
    """Return the smallest size from `size` on that gives each thread whole steps."""
    step = _STEP * max(1, min(num_threads, -(-size // _LEAST_SHARE)))
    return -(-size // step) * step


def even_activations(model: nn.Module) -> None:
    """Make all activations of the model's modules even from now on.

    A forward that calls torch's functions itself is copied with other globals. If the whole step ran under
    EvenFunctions instead, a decode step would take 7 to 18 % longer (bench.engine's model, one thread).
    """
    for module in model.modules():
        if isinstance(module, _MODULES) or type(module).__module__ == "transformers.activations":
            module.forward = even(module.forward)
        elif _calls_activations(forward := type(module).forward):
            module.forward = MethodType(with_globals(forward, **even_names(forward)), module)


def _calls_activations(forward: Any) -> bool:
    plain = inspect.unwrap(forward)
    return isinstance(plain, FunctionType) and not _NAMES.isdisjoint(plain.__code__.co_names)


class EvenFunctions(TorchFunctionMode):
    """Torch's functions and methods are even while this is entered, whatever Python code calls them."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_EVEN_FUNCTIONS.get(function) or function)(*args, **(kwargs or {}))


class _Names:
    def __init__(self, module: ModuleType, **own: Any) -> None:
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_FUNCTIONAL = _Names(functional, **{name: even(getattr(functional, name)) for name in _NAMES})
_NN = _Names(nn, functional=_FUNCTIONAL)
_TORCH = _Names(torch, nn=_NN, sigmoid=even(torch.sigmoid))
_EVEN = {id(functional): _FUNCTIONAL, id(nn): _NN, id(torch): _TORCH}


_EVEN_FUNCTIONS: dict[Any, Activation] = {
    function: even(function)
    for name in (*_NAMES, "exp", "log", "log1p", "tanh")
    for module in (torch, Tensor, functional)
    if (function := getattr(module, name, None)) is not None
}


def even_names(function: FunctionType) -> dict[str, Any]:
    plain = inspect.unwrap(function)
    names = {name: plain.__globals__.get(name) for name in plain.__code__.co_names}
    return {name: _EVEN[id(value)] for name, value in names.items() if id(value) in _EVEN}


def with_globals(function: FunctionType, **changed: Any) -> FunctionType:
    """Return a copy of the function with other globals, within the same decorators.

    If a decorator holds the function otherwise than in a variable of its own, this cannot find it and changes
    nothing.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _remade(function, {**function.__globals__, **changed}, function.__closure__)
    changed_inner = with_globals(inner, **changed)
    closure = tuple(
        CellType(changed_inner) if cell.cell_contents is inner else cell
        for cell in function.__closure__ or ()
    )
    anew = _remade(function, function.__globals__, closure)
    update_wrapper(anew, changed_inner)
    return anew


def _remade(
    function: FunctionType, own_globals: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    anew = FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, closure)
    anew.__kwdefaults__ = function.__kwdefaults__
    return anew
