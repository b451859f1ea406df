"""These tests show what attends on the device: torch's flash attention for prompts, our Triton kernels for
single tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.attention.kernels.kernel_cases import Layout, attended, steps
from services.engine.torch.attention.attention_trial import require_agreement, require_causal, require_stored
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.device import open_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Each is compiled once. The kernels multiply in tf32x3, which is float32 but for the last bits.
LAYOUTS = [
    Layout(torch.bfloat16, 128, 4),
    Layout(torch.bfloat16, 80, 1),
    Layout(torch.bfloat16, 256, 8),
    Layout(torch.float16, 64, 8),
    Layout(torch.float32, 128, 4),
    Layout(torch.bfloat16, 192, 8, v_head_dim=128),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.002}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def attend_parts():
    from services.engine.torch.attention.gpu_attention_kernel import attend_parts

    return attend_parts


def pool(device, dtype, page_size, head_dim):
    shape = PageShape(3, 2, page_size, head_dim, head_dim)
    return PagedKv(torch.zeros(shape.page_numbers, dtype=dtype, device=open_device(device)), shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 128), (16, 64), (7, 128)])
def test_prompts_are_a_plain_softmax(device, dtype, page_size, head_dim):
    require_causal(pool(device, dtype, page_size, head_dim), num_heads=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "num_heads"), [(16, 4), (256, 2)])
def test_prompts_of_any_length_are_too(device, dtype, head_dim, num_heads):
    """torch's kernel for masks was wrong at some, with short chunks far on."""
    spans = [(start, length) for length in (2, 4, 33) for start in range(80, 112)]
    require_causal(pool(device, dtype, 16, head_dim), num_heads, spans)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 128), (7, 64)])
def test_single_tokens_agree_with_prompts(device, attend_parts, dtype, page_size, head_dim):
    kv = pool(device, dtype, page_size, head_dim)
    require_agreement(OnDevice(attend_parts, num_heads=8, num_programs=264), kv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 128), (7, 80), (16, 12)])
def test_tokens_are_stored_as_torch_stores_them(device, attend_parts, dtype, page_size, head_dim):
    from services.engine.torch.attention.gpu_attention_kernel import store_kv

    require_stored(store_kv, pool(device, dtype, page_size, head_dim))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_single_tokens_are_what_float64_says(device, attend_parts, layout):
    @settings(max_examples=8 if device == "cuda" else 2, derandomize=True)
    @given(step=steps(), num_programs=st.sampled_from([1, 16, 264]), seed=st.integers(0, 99))
    def holds(step, num_programs, seed):
        output, expected = attended(attend_parts, step, layout, num_programs, seed, device)
        tolerance = TOLERANCE[layout.dtype]
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)

    holds()
