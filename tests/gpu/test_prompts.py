"""Prompts that attend together on the device: the Triton kernel that gathers, torch's flash attention."""

from types import SimpleNamespace

import pytest
import torch

from engine.torch.attention.paging import view_of
from engine.torch.attention.plain_prompts import varlen_plainly
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention import prompts
from services.engine.torch.attention.attention_trial import require_gathered, require_packed
from services.engine.torch.attention.paged_attention import paged_attention
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.prompts import Packing
from services.engine.torch.attention.step_view import Reach
from services.engine.torch.device import open_device
from services.values.kv import GroupKind
from services.values.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = [torch.bfloat16, torch.float16]
REACHES = [Reach(0), Reach(0, GroupKind.SLIDING_WINDOW, 1000)]


@pytest.fixture
def gather_pages(device, monkeypatch):
    from services.engine.torch.attention.gather_kernel import gather_pages

    if device == "cpu":  # no flash attention is there
        monkeypatch.setattr(prompts, "varlen_attn", varlen_plainly)
    return gather_pages


def pool(device, dtype, page_size, head_dim, num_pages=1, num_kv_heads=2):
    shape = PageShape(3, num_kv_heads, page_size, head_dim, head_dim)
    numbers = torch.zeros(num_pages * shape.page_numbers, dtype=dtype, device=open_device(device))
    return PagedKv(numbers, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "num_heads"),
    [(64, 128, 4), (16, 64, 16), (7, 80, 2), (64, 96, 8), (64, 192, 8), (64, 256, 16), (4, 8, 6)],
)
def test_they_are_a_plain_softmax(device, gather_pages, dtype, page_size, head_dim, num_heads):
    kv = pool(device, dtype, page_size, head_dim)
    require_gathered(gather_pages, kv)
    for has_sinks in (False, True):
        require_packed(Packing(gather_pages, has_sinks), kv, num_heads)
        require_packed(Packing(prompts.gather_plainly, has_sinks), kv, num_heads)


@pytest.mark.parametrize("head_dims", [(128, 128), (256, 256), (192, 128), (36, 20)], ids=str)
def test_those_with_soft_caps_are_too(device, gather_pages, head_dims):
    from services.engine.torch.attention.prompt_kernel import attend_rows

    for dtype in DTYPES:
        shape = PageShape(3, 2, 16, *head_dims)
        kv = PagedKv(torch.zeros(shape.page_numbers, dtype=dtype, device=open_device(device)), shape)
        for has_sinks in (False, True):
            require_packed(Packing(gather_pages, has_sinks, attend_rows), kv, num_heads=4)


def of_lengths(spans, page_size):
    chunks, next_page = [], 0
    for start, length in spans:
        end_page = next_page - (-(start + length) // page_size)
        pages = range(next_page, end_page)[::-1]
        chunks.append(Chunk(range(length), start, pages, sample=False, sampling=SamplingParams()))
        next_page = end_page
    return chunks, next_page


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_long_ones_attend_as_each_alone_does(device, gather_pages, reach):
    """Nothing waits for the device meanwhile."""
    scale = 1 if device == "cuda" else 16
    spans = [(0, 2048), (8192, 2048), (3000, 77), (0, 5), (700, 300)]
    chunks, num_pages = of_lengths([(start // scale, max(2, n // scale)) for start, n in spans], 64)
    kv = pool(device, torch.bfloat16, 64, 128, num_pages, num_kv_heads=4)
    generator = torch.Generator(kv.numbers.device).manual_seed(0)
    total = sum(len(chunk.token_ids) for chunk in chunks)

    def random(*size):
        return torch.randn(size, generator=generator, device=kv.numbers.device).to(torch.bfloat16)

    kv.numbers.copy_(random(len(kv.numbers)))
    # Models have the heads of a token side by side.
    query, key, value = (random(1, total, heads, 128).transpose(1, 2) for heads in (20, 4, 4))
    sinks = random(20)
    for s_aux in (None, sinks):

        def attended(packing, s_aux=s_aux):
            view = view_of(kv, chunks, reach=reach, packing=packing)
            output, _ = paged_attention(
                SimpleNamespace(), query, key, value, None, scaling=128**-0.5, paged=view, s_aux=s_aux
            )
            return output

        expected = attended(None)
        for gather in (gather_pages, prompts.gather_plainly):
            attended(Packing(gather))  # A kernel is compiled.
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                output = attended(Packing(gather))
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(output.float(), expected.float(), atol=0.02, rtol=0.02)
