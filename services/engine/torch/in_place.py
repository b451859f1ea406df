"""What attends single tokens to pages where they lie, chosen once, when the runner starts.

On a CPU that is decode_kernel.py; on a GPU triton_kernel.py, if it compiles there and agrees with the gather
path, which copies each sequence's K and V and needs nothing but torch. If not, that path serves them too, as
it serves all chunks of several tokens. (A kernel that breaks the CUDA context ends the process, for torch
cannot go on either.)
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from torch import Tensor

from services.engine.paged.runner import Chunk
from services.engine.torch.attention import IN_PLACE_DTYPES, paged_attention
from services.engine.torch.parts import OnDevice
from services.engine.torch.step_view import InPlace, view_step
from services.request import SamplingParams

logger = logging.getLogger(__name__)

# How far two ways to compute the same may differ: relative, and absolute for numbers below 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}
_PROGRAMS_OF_A_PROCESSOR = 2


class KernelWrong(Exception):
    """A kernel does not compute what the gather path does."""


def choose_in_place(kv: Tensor, num_heads: int) -> InPlace | OnDevice | None:
    """For the pool `kv`; None where single tokens must gather. Takes some seconds on a GPU."""
    if kv.device.type == "cuda":
        return _on_cuda(kv, num_heads)
    if kv.dtype not in IN_PLACE_DTYPES:
        return None
    num_threads = torch.get_num_threads()
    executor = ThreadPoolExecutor(num_threads - 1, "attention") if num_threads > 1 else None
    return InPlace(num_threads, executor)


def _on_cuda(kv: Tensor, num_heads: int) -> OnDevice | None:
    properties = torch.cuda.get_device_properties(kv.device)
    try:
        # Only torch for CUDA brings Triton along, and it takes a second to import.
        from services.engine.torch.triton_kernel import attend_parts

        num_programs = _PROGRAMS_OF_A_PROCESSOR * properties.multi_processor_count
        on_device = OnDevice(attend_parts, num_heads, num_programs)
        require_agreement(on_device, kv)
    except Exception as error:  # Triton's, a compiler's, torch's: whatever it is, we can do without
        logger.warning("attention_kernel_unusable error=%r", error)
        return None
    logger.info("attention_kernel_ready kernel=triton")
    return on_device


def require_agreement(on_device: OnDevice, kv: Tensor) -> None:
    """Compile for the layout of `kv` and compare on a small pool of random pages; `kv` is not touched.

    Slots that nobody reads hold NaN there. Raises KernelWrong, and whatever compiling and running raises.
    """
    num_kv_heads, page_size, head_dim = kv.shape[3:]
    chunks = _example_chunks(page_size)
    num_pages = 1 + max(max(chunk.pages) for chunk in chunks)
    generator = torch.Generator(kv.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kv.device).to(kv.dtype)

    pool = random(num_pages, 2, 2, num_kv_heads, page_size, head_dim)
    for chunk in chunks:
        if chunk.end % page_size:
            pool[chunk.pages[-1], ..., chunk.end % page_size :, :] = torch.nan
    total = sum(len(chunk.token_ids) for chunk in chunks)
    # Scores of some size, so that few tokens decide: one that is left out is seen.
    query = 4 * random(1, on_device.num_heads, total, head_dim)
    key, value = random(1, num_kv_heads, total, head_dim), random(1, num_kv_heads, total, head_dim)
    outputs = []
    for in_place in (None, on_device):
        view = view_step(pool, chunks, in_place)
        layer = SimpleNamespace(layer_idx=1)
        outputs.append(
            paged_attention(layer, query, key, value, None, scaling=head_dim**-0.5, paged=view)[0].float()
        )
    expected, got = outputs
    excess = ((got - expected).abs() / expected.abs().clamp(min=1)).max().item()
    if not excess <= _TOLERANCE[kv.dtype]:  # nor for NaN
        raise KernelWrong(f"differs from the gather path by {excess:.2g} of {_TOLERANCE[kv.dtype]:.2g}")


def _example_chunks(page_size: int) -> list[Chunk]:
    """Twenty readers of a prefix, three of them of a longer one, odd tails, and who reads alone."""
    outer, inner = (list(range(-(-num_tokens // page_size))) for num_tokens in (300, 40))
    next_page = len(outer) + len(inner)
    inner = [len(outer) + page for page in inner]
    chunks = []

    def add(prefix: list[int], num_tokens: int, length: int = 1) -> None:
        nonlocal next_page
        end_page = next_page - (-num_tokens // page_size)
        pages, next_page = [*prefix, *range(next_page, end_page)], end_page
        start = len(prefix) * page_size + num_tokens - length
        chunks.append(Chunk(range(length), start, pages, sample=False, sampling=SamplingParams()))

    for i in range(17):
        add(outer, 1 + 7 * i % (2 * page_size))
    add([], page_size + 3, length=3)  # a prompt's
    for i in range(3):
        add(outer + inner, 1 + i % page_size)
    for num_tokens in (1, page_size, page_size + 1, 333):
        add([], num_tokens)
    return chunks
