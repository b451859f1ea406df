"""RMS norms are known by trying them: what they give for random rows tells how they treat their weight."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.torch.model.fused import plain
from services.engine.torch.model.fused.fused import Fused
from services.engine.torch.model.fused.plain import Normalize, NormForm
from services.engine.torch.model.fused.trials import MOST_UNLIKE, unlike

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_SCALES = (1e-3, 1.0, 50.0)  # with the smallest the epsilon counts
_WIDTH = 48  # it is tried with so many where it has no weight


def fuse_norms(model: PreTrainedModel, fused: Fused, normalize: Normalize) -> None:
    for module in model.modules():
        epsilon = _epsilon_of(module)
        if epsilon is None:
            continue
        form = _form_of(module, epsilon, model, normalize)
        if form is not None:
            _replace(module, form, model.dtype, fused, normalize)
            fused.num_norms += 1


def _epsilon_of(module: nn.Module) -> float | None:
    """Return what may be a norm's epsilon, where the rest of the module does not contradict."""
    weights = list(module.parameters(recurse=False))
    if len(weights) > 1 or any(each.dim() != 1 for each in weights):
        return None
    if list(module.children()) or list(module.buffers(recurse=False)):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # it takes rows alone
        return None
    return next((found for name in _EPSILONS if isinstance(found := vars(module).get(name), float)), None)


def _form_of(
    module: nn.Module, epsilon: float, model: PreTrainedModel, normalize: Normalize
) -> NormForm | None:
    """Return how the module norms; None where it does something else, or the kernel gives another result."""
    with _random_weight(module) as weight:
        try:
            tried = [(rows, module(rows)) for rows in _random_rows(weight, model)]
        except Exception:  # a module that is no norm may raise any
            return None

        def share(form: NormForm, way: Normalize) -> float:
            return max(unlike(given, way(rows, weight, form)) for rows, given in tried)

        ways = ((False, True), (False, False), (True, False), (True, True))
        forms = [NormForm(epsilon, *way) for way in (ways if weight is not None else ways[:1])]
        form = min(forms, key=lambda each: share(each, plain.normalize))
        is_known = share(form, plain.normalize) <= MOST_UNLIKE
        return form if is_known and share(form, normalize) <= MOST_UNLIKE else None


def _random_rows(weight: Tensor | None, model: PreTrainedModel) -> Iterator[Tensor]:
    width = _WIDTH if weight is None else len(weight)
    generator = torch.Generator().manual_seed(0)
    for scale in _SCALES:
        yield (scale * torch.randn(1, 7, width, generator=generator)).to(model.device, model.dtype)


@contextmanager
def _random_weight(module: nn.Module) -> Iterator[Tensor | None]:
    """Let the weight be random for as long: nothing could be told from one of all ones."""
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


def _replace(
    module: nn.Module, form: NormForm, tried: torch.dtype, fused: Fused, normalize: Normalize
) -> None:
    original: Callable[..., Any] = module.forward
    weight = next(module.parameters(recurse=False), None)
    # Some weights are of float32 in a model that is not; and the check at start widens everything.
    weight_dtype = None if weight is None else weight.dtype

    def forward(*rows: Tensor, **named: Tensor) -> Any:
        if fused.is_on and not named:
            dtypes = (rows[0].dtype, None if weight is None else weight.dtype)
            if dtypes == (tried, weight_dtype) or set(dtypes) <= {torch.float32, None}:
                return normalize(rows[0], weight, form)
        return original(*rows, **named)

    module.forward = forward
