"""The runner chooses at its start the kernel that attends to pages in place.

On a CPU that is cpu_attention_kernel.py, for all tokens. On a GPU it is gpu_attention_kernel.py, for single
tokens, if it compiles there and agrees with the gather path, which copies each sequence's K and V and needs
only torch. If not, the gather path serves them, too, as it serves all chunks of several tokens there, and
latents. The gather path is checked first (attention_trial.py). With the kernel comes one that stores K and V,
if its result is equal to the bit; otherwise torch stores them. (A kernel that breaks the CUDA context ends
the process, as torch cannot continue either.) Chunks of several tokens are packed (prompts.py) if that is
right, too: with torch's flash attention, or with a kernel of ours where layers have soft caps or K and V have
different widths.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from services.engine.torch.attention.attention_trial import (
    require_agreement,
    require_causal,
    require_gathered,
    require_packed,
    require_stored,
)
from services.engine.torch.attention.page_pieces import TUNING, OnDevice, Read, StoreKv, pieces_of
from services.engine.torch.attention.paged_kv import PagedKv
from services.engine.torch.attention.prompts import (
    AttendRows,
    GatherPages,
    Packing,
    gather_plainly,
    is_for_flash,
    is_half,
)
from services.engine.torch.attention.step_view import IN_PLACE_DTYPES, InPlace
from services.values.kv import PageId

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)  # torch has flash attention on GPUs from this one on.


def choose_in_place(
    pools: Sequence[PagedKv], num_heads: Sequence[frozenset[int]]
) -> tuple[InPlace | OnDevice | None, ...]:
    """Choose each pool's kernel by its layers' numbers of query heads; None means that single tokens gather.

    On a GPU this takes some seconds per pool. Raises ConfigError where the gather path is wrong, too.
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
    # This compiles the planning of a step of several rows now, and not in the first such step.
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
        # Only torch for CUDA includes Triton, which takes a second to import.
        from services.engine.torch.attention.gpu_attention_kernel import attend_parts

        num_programs = TUNING.programs * properties.multi_processor_count
        on_device = OnDevice(attend_parts, heads, num_programs)
        require_agreement(on_device, kv)
    # Triton, a compiler or torch may raise anything, and the gather path works without the kernel.
    except Exception as error:
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
    pools: Sequence[PagedKv], num_heads: Sequence[frozenset[int]], are_capped: Sequence[bool]
) -> tuple[Packing | None, ...]:
    """Choose for each pool how its prompts attend together; None means one by one.

    `are_capped` has whether layers of each pool have soft caps.
    """
    return tuple(_packing(*each) for each in zip(pools, num_heads, are_capped, strict=True))


def _packing(kv: PagedKv, num_heads: frozenset[int], is_capped: bool) -> Packing | None:
    device = kv.numbers.device
    if device.type != "cuda" or not is_half(kv):
        return None
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return None
    if kv.is_latent:  # What is attended to is known to the model alone: each graph's trial tries it.
        return Packing(_gathering(kv))
    packing, gather, by_flash = None, _gathering(kv), is_for_flash(kv) and not is_capped
    for has_sinks in (False, True):
        try:
            tried = Packing(gather, has_sinks, None if by_flash else _attending_by_rows())
            for heads in num_heads:
                require_packed(tried, kv, heads)
        except Exception as error:  # The reason is the same as above.
            logger.warning("prompts_not_packed sinks=%s error=%r", has_sinks, error)
            break
        packing = tried
    return packing


def _attending_by_rows() -> AttendRows:
    from services.engine.torch.attention.prompt_kernel import attend_rows

    return attend_rows


def _gathering(kv: PagedKv) -> GatherPages:
    try:
        from services.engine.torch.attention.gather_kernel import gather_pages

        require_gathered(gather_pages, kv)
    except Exception as error:
        logger.warning("gather_kernel_unusable error=%r", error)
        return gather_plainly
    return gather_pages
