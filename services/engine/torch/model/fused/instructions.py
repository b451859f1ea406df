"""Which functions of definitions are the same: transformers copies them from model to model."""

import inspect
from collections.abc import Callable


def same_instructions(one: Callable[..., object], other: Callable[..., object]) -> bool:
    """But for decorators, docstrings, and what their names mean to them."""
    return _instructions(one) == _instructions(other)


def _instructions(function: Callable[..., object]) -> tuple[object, ...] | None:
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    if code is None:
        return None
    constants = tuple(None if each == plain.__doc__ else each for each in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants, plain.__defaults__
