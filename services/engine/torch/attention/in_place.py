"""The kernel that attends to pages where they lie is chosen once, when the runner starts.

On a CPU that is cpu_attention_kernel.py, for all tokens; on a GPU gpu_attention_kernel.py, for single ones,
if it compiles there and agrees with the gather path, which copies each sequence's K and V and needs nothing
but torch. If not, that path serves them too, as it serves all chunks of several tokens there, and latents; it
is tried itself, before that (agreement.py). Where the kernel is taken, so is one that stores K and V, if it
does that to the bit; else torch stores them. (A kernel that breaks the CUDA context ends the process, for
torch cannot go on either.) Chunks of several tokens are packed (prompts.py) where that is right, too.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from services.engine.torch.attention.agreement import (
    require_agreement,
    require_causal,
    require_gathered,
    require_packed,
    require_stored,
)
from services.engine.torch.attention.page_pieces import TUNING, OnDevice, Read, StoreKv, pieces_of
from services.engine.torch.attention.paged_kv import PagedKv
from services.engine.torch.attention.prompts import GatherPages, Packing, gather_plainly, is_packable
from services.engine.torch.attention.step_view import IN_PLACE_DTYPES, InPlace
from services.values.kv import PageId

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)  # of a GPU on which torch has flash attention


def choose_in_place(
    pools: Sequence[PagedKv], num_heads: Sequence[frozenset[int]]
) -> tuple[InPlace | OnDevice | None, ...]:
    """Choose for each pool, by its layers' numbers of query heads; None where its single tokens must gather.

    It takes some seconds a pool on a GPU. Raises ConfigError where not even those that gather attend as they
    should.
    """
    on_cpu = _on_cpu() if any(_is_read_by_numba(kv) for kv in pools) else None
    return tuple(_choose(kv, heads, on_cpu) for kv, heads in zip(pools, num_heads, strict=True))


def end_threads(in_place: Sequence[InPlace | OnDevice | None]) -> None:
    for chosen in in_place:
        if isinstance(chosen, InPlace) and chosen.executor is not None:
            chosen.executor.shutdown()


def _choose(kv: PagedKv, num_heads: frozenset[int], on_cpu: InPlace | None) -> InPlace | OnDevice | None:
    if kv.is_latent:
        logger.info("attention_gathers reason=%r", "a latent is expanded by the model, whole")
        return None
    if kv.numbers.device.type == "cuda":
        return _on_cuda(kv, num_heads)
    return on_cpu if _is_read_by_numba(kv) else None


def _is_read_by_numba(kv: PagedKv) -> bool:
    return kv.numbers.device.type == "cpu" and kv.numbers.dtype in IN_PLACE_DTYPES and not kv.is_latent


def _on_cpu() -> InPlace:
    # What plans a step of several rows is compiled now, and not in the first such step.
    pieces_of([Read([PageId(0)], 0, 0, 1)] * 2, page_size=1)
    num_threads = torch.get_num_threads()
    executor = ThreadPoolExecutor(num_threads - 1, "attention") if num_threads > 1 else None
    return InPlace(num_threads, executor)


def _on_cuda(kv: PagedKv, num_heads: frozenset[int]) -> OnDevice | None:
    for heads in num_heads:
        require_causal(kv, heads)
    if len(num_heads) > 1:
        logger.info("attention_gathers reason=%r", f"layers of one pool have {sorted(num_heads)} heads")
        return None
    (heads,) = num_heads
    properties = torch.cuda.get_device_properties(kv.numbers.device)
    try:
        # torch for CUDA alone brings Triton along, and it takes a second to import.
        from services.engine.torch.attention.gpu_attention_kernel import attend_parts

        num_programs = TUNING.programs * properties.multi_processor_count
        on_device = OnDevice(attend_parts, heads, num_programs)
        require_agreement(on_device, kv)
    except Exception as error:  # whatever Triton, a compiler or torch raises, we can do without
        logger.warning("attention_kernel_unusable error=%r", error)
        return None
    logger.info("attention_kernel_ready kernel=triton")
    return replace(on_device, store=_storing(kv))


def _storing(kv: PagedKv) -> StoreKv | None:
    try:
        from services.engine.torch.attention.gpu_attention_kernel import store_kv

        require_stored(store_kv, kv)
    except Exception as error:
        logger.warning("store_kernel_unusable error=%r", error)
        return None
    return store_kv


def choose_packings(
    pools: Sequence[PagedKv], num_heads: Sequence[frozenset[int]]
) -> tuple[Packing | None, ...]:
    """Choose for each pool how its prompts attend together; None where they do so one by one."""
    return tuple(_packing(kv, heads) for kv, heads in zip(pools, num_heads, strict=True))


def _packing(kv: PagedKv, num_heads: frozenset[int]) -> Packing | None:
    device = kv.numbers.device
    if device.type != "cuda" or not is_packable(kv):
        return None
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return None
    packing, gather = None, _gathering(kv)
    for has_sinks in (False, True):
        try:
            tried = Packing(gather, has_sinks)
            for heads in num_heads:
                require_packed(tried, kv, heads)
        except Exception as error:  # as above
            logger.warning("prompts_not_packed sinks=%s error=%r", has_sinks, error)
            break
        packing = tried
    return packing


def _gathering(kv: PagedKv) -> GatherPages:
    try:
        from services.engine.torch.attention.gather_kernel import gather_pages

        require_gathered(gather_pages, kv)
    except Exception as error:
        logger.warning("gather_kernel_unusable error=%r", error)
        return gather_plainly
    return gather_pages
