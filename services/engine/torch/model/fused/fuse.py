"""A model on a GPU is fused when it is made: there a step of single tokens waits for launches.

A Llama's layer makes 41 of them as it is defined, and 13 fused. No model is known by its name: products are
found by who gets the same tensor, the rest by trying what a module computes. What is not known, or does not
agree with its definition on this device, stays as it is.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from services.engine.start_fault import start_fault
from services.engine.torch.model.fused.known_operations import fuse_activations, fuse_norms, fuse_rotations
from services.engine.torch.model.fused.plain_kernels import PLAIN, Kernels
from services.engine.torch.model.fused.products import Fused, merge_products
from services.values.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)


def fuse(
    model: PreTrainedModel, linears_kept: Collection[nn.Module] = (), kernels: Kernels | None = None
) -> Fused:
    """Fuse what can be fused, from now on, but for linear layers whose weights others read.

    Raises ConfigError and Unavailable as probe does.
    """
    fused = Fused()
    try:
        merge_products(model, fused, linears_kept)
    except (ConfigError, Unavailable):
        raise
    except Exception as error:  # memory for a stack of weights may be short
        raise start_fault(f"{type(model).__name__} cannot be fused: {error!r}", error) from error
    kernels = kernels or _kernels_of(model.device)
    if kernels is not None:
        with _leaving_out("norms"):
            fuse_norms(model, fused, kernels.normalize)
        with _leaving_out("rotations"):
            fuse_rotations(model, fused, kernels.rotate)
        with _leaving_out("activations"):
            fuse_activations(model, fused, kernels.activate)
    logger.info(
        "fused products=%d norms=%d rotations=%d activations=%d",
        *(fused.num_products, fused.num_norms, fused.num_rotations, fused.num_activations),
    )
    return fused


@contextmanager
def _leaving_out(what: str) -> Iterator[None]:
    """Leave `what` as it is where a kernel fails, whatever Triton or a compiler raises: we can do without."""
    try:
        with torch.inference_mode():
            yield
    except Exception as error:
        logger.warning("fused_kernels_unusable of=%s error=%r", what, error)


def _kernels_of(device: torch.device) -> Kernels | None:
    if device.type != "cuda":
        return PLAIN
    # torch for CUDA alone brings Triton along, and it takes a second to import.
    with _leaving_out("all"):
        from services.engine.torch.model.fused.fused_kernel import KERNELS

        return KERNELS
    return None
