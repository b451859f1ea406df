"""This module opens a runner's device and waits for it."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.values.errors import ConfigError

log = logging.getLogger(__name__)


def open_device(name: str) -> torch.device:
    """Open a device by its name: cpu, cuda or cuda:N.

    Raises ConfigError for another name and for a missing device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    # On Hopper torch prefers cuDNN to flash attention. cuDNN builds a plan for each new pair of lengths,
    # which takes some 25 ms, and keeps all plans; nearly every prompt chunk here has new lengths.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", index)


def warn_if_slow(device: torch.device, dtype: torch.dtype) -> None:
    """Log a warning where half precision is slow because the processor has no instructions for it.

    Half precision takes longer than float32 there. So does the start, which tries the model in both types.
    """
    if device.type == "cpu" and dtype != torch.float32 and not _computes_in(dtype):
        name = str(dtype).removeprefix("torch.")
        log.warning(
            "half_precision_is_slow dtype=%s reason=%r",
            name,
            "this processor has no instructions for it: float32 is faster, and takes twice the memory; the "
            "start may take minutes",
        )


def _computes_in(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.cpu._is_amx_fp16_supported())


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Return arrays of one type and dimension as tensors on the device.

    A GPU gets them in one copy that the host does not wait for: its source is pinned memory, which torch does
    not reuse before the copy is done.

    Raises RuntimeError while a CUDA graph is captured: each replay would read this memory again.
    """
    if device.type != "cuda":
        return tuple(torch.from_numpy(array).to(device) for array in arrays)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a graph is captured, and the host sends something that is of this step alone")
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    each: tuple[Tensor, ...] = packed.split([len(array) for array in arrays])
    return each


def finish_step(device: torch.device) -> None:
    """Wait until all that the step has launched is done, so that a transport may read its pages.

    All of it is on the current stream, Triton's kernels included. This does not wait for other streams, which
    copy pages for digests and for UCX.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def abandon_step(device: torch.device, error: BaseException) -> None:
    """Wait until nothing that a step has launched runs any more; the step failed with `error`.

    Its pages are allocated to other requests next. No stream orders a NIC's writes there after the writes of
    this step's kernels.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as also:  # The CUDA context is broken, and `error` is what gets reported.
        error.add_note(f"{device} could not be waited for: {also}")
