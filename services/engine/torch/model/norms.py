"""RMS norms by one call of torch's where a definition makes six, on a CPU: the same bits in half the time."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def fuse_norms(model: PreTrainedModel) -> None:
    """Of all modules whose forward is Llama's, instruction by instruction; others add to the weight, or round
    in between. In float32 only, where nothing is rounded in between."""
    if model.dtype != torch.float32:
        return
    for module in model.modules():
        if _instructions(type(module).forward) == _instructions(LlamaRMSNorm.forward):
            weight: Any = module.weight
            module.forward = partial(
                torch.rms_norm, normalized_shape=weight.shape, weight=weight, eps=module.variance_epsilon
            )


def _instructions(forward: Callable[..., object]) -> tuple[object, ...]:
    code = inspect.unwrap(forward).__code__
    return code.co_code, code.co_names, code.co_consts
