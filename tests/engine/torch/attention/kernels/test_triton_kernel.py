"""The GPU's attention kernel: in Triton's interpreter; compiled, not run, for GPUs (make test-triton)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.attention.kernels.kernel_cases import (
    Layout,
    Step,
    attended,
    expected_attention,
    single_token,
    steps,
)
from engine.torch.attention.paging import empty, paged, reach_view_of
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.engine.paged.model_runner import Chunk
from services.engine.torch import pools as runner_pools
from services.engine.torch.attention.attention_trial import require_agreement, require_stored
from services.engine.torch.attention.page_pieces import OnDevice, PartsView
from services.engine.torch.attention.paged_kv import PagedKv, PageShape, Scores
from services.engine.torch.attention.step_view import view_step
from services.engine.torch.model import packed_model
from services.engine.torch.runner import TorchRunner
from services.values.request import SamplingParams

# Compiling and interpreting take their time where others compute too.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0)
# Scores are sums of 128 products and about 10 at most: float32 rounds them by some 1e-6 each, as it does exp.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.002}


@pytest.fixture(scope="module")
def attend_parts():
    from services.engine.torch.attention.gpu_attention_kernel import IS_INTERPRETED, attend_parts

    assert IS_INTERPRETED, "TRITON_INTERPRET=1 must be set before anyone imports Triton"
    return attend_parts


@pytest.fixture(scope="module")
def store_kv(attend_parts):
    from services.engine.torch.attention.gpu_attention_kernel import store_kv

    return store_kv


@settings(max_examples=25)
@given(
    step=steps(),
    group=st.sampled_from([1, 2, 4, 8]),
    head_dims=st.sampled_from([(64, 64), (80, 80), (128, 128), (24, 16), (64, 96)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_programs=st.sampled_from([1, 16, 264]),
    seed=st.integers(0, 99),
)
def test_it_computes_what_float64_does(attend_parts, step, group, head_dims, dtype, num_programs, seed):
    layout = Layout(dtype, head_dims[0], group, head_dims[1])
    output, expected = attended(attend_parts, step, layout, num_programs, seed)
    torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=10)
@given(step=steps(), head_dims=st.sampled_from([(64, 64), (24, 16)]), seed=st.integers(0, 99))
def test_pages_of_8_bits_are_read_as_the_numbers_they_are(attend_parts, step, head_dims, seed):
    """They are read as pages of the model's own type that have the same numbers, to the bit."""
    generator = torch.Generator().manual_seed(seed)
    shape = PageShape(2, 2, step.page_size, *head_dims)
    numbers = torch.randn(step.num_pages * shape.page_numbers, generator=generator).to(torch.float8_e4m3fn)
    query = torch.randn(len(step.chunks), 4, head_dims[0], generator=generator)
    scores = Scores(0.3, step.softcap, torch.randn(4, generator=generator) if step.has_sinks else None)
    for dtype in (torch.float32, torch.bfloat16):
        outputs = []
        for kv in (PagedKv(numbers, shape, dtype), PagedKv(numbers.to(dtype), shape)):
            view = reach_view_of(kv, step.chunks, OnDevice(attend_parts, 4, 16), step.reach).decode
            outputs.append(torch.full((len(query), 4, head_dims[1]), torch.nan, dtype=dtype))
            attend_parts(view, query.to(dtype), kv, 1, scores, outputs[-1])
        assert torch.equal(*outputs)


@pytest.mark.parametrize(("dtype", "page_size"), [(torch.float32, 7), (torch.bfloat16, 64)])
def test_the_runners_own_check_finds_it_right(attend_parts, dtype, page_size):
    kv = empty(PageShape(3, 1, page_size, 64, 64), dtype=dtype)
    require_agreement(OnDevice(attend_parts, num_heads=4, num_programs=264), kv)


def test_it_stores_what_torch_does(store_kv, subtests):
    for dtype, num_kv_heads, page_size, head_dim, v_head_dim in [
        (torch.float32, 2, 16, 64, 64),
        (torch.bfloat16, 10, 64, 128, 128),
        (torch.float16, 1, 1, 80, 80),
        (torch.bfloat16, 3, 7, 192, 128),
        (torch.bfloat16, 9, 16, 256, 20),
        (torch.float32, 4, 48, 7, 12),
    ]:
        shape = PageShape(3, num_kv_heads, page_size, head_dim, v_head_dim)
        with subtests.test(dtype=dtype, shape=shape):
            require_stored(store_kv, empty(shape, dtype=dtype))


def test_scores_far_apart_join_without_overflow(attend_parts):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(40, 2, 2, 1, 16, 64, generator=generator)
    kv[17] *= 1000
    chunks = [single_token(40 * 16 - 3, list(range(40)))]
    query = 100 * torch.randn(1, 2, 64, generator=generator)
    on_device = OnDevice(attend_parts, num_heads=2, num_programs=264)
    view = reach_view_of(paged(kv), chunks, on_device).decode
    assert len(view.parts) > 1
    output = torch.empty_like(query)
    attend_parts(view, query, paged(kv), 1, Scores(1.0), output)
    expected = expected_attention(paged(kv), Step(16, 40, chunks), query, Scores(1.0))
    torch.testing.assert_close(output.double(), expected, atol=0.05, rtol=1e-3)


@pytest.fixture
def views(attend_parts, store_kv, monkeypatch):
    """These are the views of the steps; all runners store and attend by the kernels."""
    recorded = []

    def recording(*args):
        view = view_step(*args)
        recorded.extend(view.by_reach.values())
        return view

    monkeypatch.setattr(packed_model, "view_step", recording)
    monkeypatch.setattr(
        runner_pools,
        "choose_in_place",
        lambda pools, num_heads: [OnDevice(attend_parts, max(heads), 16, store_kv) for heads in num_heads],
    )
    return recorded


def test_greedy_output_is_that_of_transformers(views):
    """Three sequences share a prefix, one is alone; prompts join between decode steps."""
    directory = tiny_checkpoint("llama")
    runner = TorchRunner(directory, num_pages=64, page_size=16, self_check=False)
    prefix = random_prompt(128, seed=1)
    prompts = [prefix + random_prompt(n, seed=n) for n in (40, 2, 17)] + [random_prompt(75, seed=75)]
    tables = [[*range(8), *range(8 + 6 * i, 14 + 6 * i)] for i in range(3)] + [list(range(63, 50, -1))]
    ids, starts = [list(prompt) for prompt in prompts], [0, 128, 128, 0]
    for step in range(16):
        chunks = []
        for own, start, pages in list(zip(ids, starts, tables, strict=True))[: 1 + step]:
            chunks.append(Chunk(own[start:], start, pages, sample=True, sampling=GREEDY, history=own[:]))
        for i, (chunk, [sampled]) in enumerate(zip(chunks, runner.run(chunks), strict=True)):
            starts[i] = chunk.end
            ids[i].append(sampled.token_id)
    for prompt, own in zip(prompts, ids, strict=True):
        output = own[len(prompt) :]
        assert count_near_ties(reference_generation(directory, prompt, len(output)), output) == 0
    of_decodes = [view for view in views if view.decode is not None]
    assert all(isinstance(view.decode, PartsView) for view in of_decodes)
    assert any(view.chunks for view in of_decodes)
    readers = [view.decode.parts[:, 3] - view.decode.parts[:, 2] for view in of_decodes]
    assert sum((counts == 3).any().item() for counts in readers) >= 10


# Compute capability, dtype, dimensions of K and V, heads to a KV head, tokens of a page: with the largest
# tiles of a type, with no power of two, and with pages of one tile and of less. Every capability has every
# type; those that can widen float8 have it, too.
COMPILED = [
    (80, "bfloat16", 128, 128, 4, 64),
    (80, "bfloat16", 256, 256, 8, 16),
    (80, "float32", 128, 128, 4, 64),
    (80, "float16", 80, 80, 7, 16),
    (90, "bfloat16", 192, 128, 8, 48),
    (90, "bfloat16", 256, 256, 8, 16),
    (90, "float32", 128, 128, 4, 64),
    (90, "float16", 80, 80, 7, 16),
    (90, "float8_e4m3fn", 256, 256, 8, 16),
    (100, "bfloat16", 256, 256, 8, 16),
    (100, "float32", 128, 128, 4, 64),
    (100, "float16", 80, 80, 7, 16),
    (100, "float8_e4m3fn", 128, 128, 2, 64),
]
SHARED_MEMORY_BYTES = 99 << 10  # of a block, on compute capability 8.6 and 8.9; others have more


def printed(program, *arguments, cache):
    """A process of its own compiles, for what is interpreted cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus_and_fits_into_their_shared_memory(capability, tmp_path):
    cases = [case for case in COMPILED if case[0] == capability]
    kernels = json.loads(printed("compile_triton_kernel.py", json.dumps(cases), cache=tmp_path))
    assert len(kernels) == 4 * len(cases) >= 16
    for kernel in kernels:
        assert kernel["cubin_bytes"] > 0
        assert kernel["shared_bytes"] <= SHARED_MEMORY_BYTES, kernel


def test_it_is_compiled_once_whatever_a_step_looks_like(tmp_path):
    """It takes a second, in which a rank stands still."""
    counts = [int(line) for line in printed("count_triton_kernels.py", cache=tmp_path).split()]
    assert len(counts) == 13
    # Of narrow parts, of wide ones, what joins them, and what stores, for ids of either size.
    assert set(counts) == {5}
