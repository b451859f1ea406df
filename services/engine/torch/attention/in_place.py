"""What attends single tokens to pages where they lie, chosen once, when the runner starts.

On a CPU that is decode_kernel.py; on a GPU triton_kernel.py, if it compiles there and agrees with the gather
path, which copies each sequence's K and V and needs nothing but torch. If not, that path serves them too, as
it serves all chunks of several tokens; it is tried itself, before that (agreement.py). (A kernel that breaks
the CUDA context ends the process, for torch cannot go on either.)
"""

import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from services.engine.torch.attention.agreement import require_agreement, require_causal
from services.engine.torch.attention.paged_attention import IN_PLACE_DTYPES
from services.engine.torch.attention.parts import OnDevice
from services.engine.torch.attention.step_view import InPlace

logger = logging.getLogger(__name__)

_PROGRAMS_OF_A_PROCESSOR = 2


def choose_in_place(kv: Tensor, num_heads: int) -> InPlace | OnDevice | None:
    """For the pool `kv`; None where single tokens must gather. Takes some seconds on a GPU.

    Raises ConfigError where not even those that gather attend as they should.
    """
    if kv.device.type == "cuda":
        return _on_cuda(kv, num_heads)
    if kv.dtype not in IN_PLACE_DTYPES:
        return None
    num_threads = torch.get_num_threads()
    executor = ThreadPoolExecutor(num_threads - 1, "attention") if num_threads > 1 else None
    return InPlace(num_threads, executor)


def _on_cuda(kv: Tensor, num_heads: int) -> OnDevice | None:
    require_causal(kv, num_heads)
    properties = torch.cuda.get_device_properties(kv.device)
    try:
        # Only torch for CUDA brings Triton along, and it takes a second to import.
        from services.engine.torch.attention.triton_kernel import attend_parts

        num_programs = _PROGRAMS_OF_A_PROCESSOR * properties.multi_processor_count
        on_device = OnDevice(attend_parts, num_heads, num_programs)
        require_agreement(on_device, kv)
    except Exception as error:  # Triton's, a compiler's, torch's: whatever it is, we can do without
        logger.warning("attention_kernel_unusable error=%r", error)
        return None
    logger.info("attention_kernel_ready kernel=triton")
    return on_device
