"""A model on a GPU is fused when it is loaded, since a step of single tokens waits for launches there.

A layer of a Llama makes 41 launches as defined, and 13 when fused. No model is known by name: products are
found by the layers that get the same tensor, the rest by trying what a module computes. What is unknown, or
differs from its definition on this device, stays as it is.
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
    """Fuse what can be fused, except linear layers whose weights other modules read.

    Raises ConfigError and Unavailable as probe does.
    """
    fused = Fused()
    try:
        merge_products(model, fused, linears_kept)
    except (ConfigError, Unavailable):
        raise
    except Exception as error:  # Memory for stacked weights may be short.
        raise start_fault(f"{type(model).__name__} cannot be fused: {error!r}", error) from error
    kernels = kernels or _kernels_of(model.device)
    if kernels is not None:
        with _leaving_out("norms"):
            fuse_norms(model, fused, kernels.normalize, kernels.add_and_normalize)
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
    """Leave `what` as defined if Triton or a compiler raises any exception, since the model works without."""
    try:
        with torch.inference_mode():
            yield
    except Exception as error:
        logger.warning("fused_kernels_unusable of=%s error=%r", what, error)


def _kernels_of(device: torch.device) -> Kernels | None:
    if device.type != "cuda":
        return PLAIN
    # Only torch for CUDA includes Triton, which takes a second to import.
    with _leaving_out("all"):
        from services.engine.torch.model.fused.fused_kernel import KERNELS

        return KERNELS
    return None
