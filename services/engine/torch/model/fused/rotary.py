"""Rotary embedding by one call of a kernel where a definition makes fourteen of torch's, on a CPU: the same
bits in a third of the time."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from services.engine.torch.model.activations import with_globals
from services.engine.torch.model.fused.instructions import same_instructions
from services.engine.torch.model.fused.rotary_kernel import rotate

Rotation = Callable[..., tuple[Tensor, Tensor]]

_NAME, _HALF_NAME = "apply_rotary_pos_emb", "rotate_half"
_SWAPPED = 0, 2, 1, 3  # heads and tokens


def fuse_rotations(model: nn.Module) -> None:
    """Of all modules whose forward calls Llama's function, or one that is it instruction by instruction."""
    for module in model.modules():
        function = getattr(module.forward, "__func__", None)
        plain = inspect.unwrap(function) if isinstance(function, FunctionType) else None
        if function is None or not isinstance(plain, FunctionType) or _NAME not in plain.__code__.co_names:
            continue
        rotation = plain.__globals__.get(_NAME)
        if rotation is not None and _is_llamas(rotation):
            module.forward = MethodType(with_globals(function, **{_NAME: fused(rotation)}), module)


def _is_llamas(rotation: Rotation) -> bool:
    half = getattr(rotation, "__globals__", {}).get(_HALF_NAME)
    return (
        half is not None
        and same_instructions(rotation, modeling_llama.apply_rotary_pos_emb)
        and same_instructions(half, modeling_llama.rotate_half)
    )


def fused(rotation: Rotation) -> Rotation:
    """The same, but for what the kernel does not take, which goes where it went."""

    @wraps(rotation)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        if others or named or not _takes(q, k, cos, sin):
            return rotation(q, k, cos, sin, *others, **named)
        queries, keys = rotate(_by_token(q), _by_token(k), cos.numpy(), sin.numpy())
        return torch.from_numpy(queries.transpose(_SWAPPED)), torch.from_numpy(keys.transpose(_SWAPPED))

    return rotated


def _by_token(heads: Tensor) -> NDArray[np.float32]:
    numbers: NDArray[np.float32] = heads.numpy().transpose(_SWAPPED)
    return numbers


def _takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Heads [1, heads, num_tokens, head_dim], angles [1, num_tokens, head_dim], all of float32."""
    if not (q.dtype is k.dtype is cos.dtype is sin.dtype is torch.float32) or cos.dim() != 3:
        return False
    of_angles = one, _, head_dim = cos.shape
    shapes = {(*sin.shape,), *((heads.shape[0], *heads.shape[2:]) for heads in (q, k))}
    return one == 1 and head_dim % 2 == 0 and shapes == {of_angles}
