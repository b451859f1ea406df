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

from checkpoints import tiny_checkpoint
from reference import count_near_ties, random_prompt, reference_generation
from services.engine.paged.runner import Chunk
from services.engine.torch import runner as torch_runner
from services.engine.torch.agreement import require_agreement
from services.engine.torch.parts import OnDevice, PartsView
from services.engine.torch.runner import TorchRunner
from services.engine.torch.step_view import view_step
from services.request import SamplingParams

# Compiling and interpreting take their time where others compute too.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.002}


@pytest.fixture(scope="module")
def attend_parts():
    from services.engine.torch.triton_kernel import _IS_INTERPRETED, attend_parts

    assert _IS_INTERPRETED, "TRITON_INTERPRET=1 must be set before anyone imports Triton"
    return attend_parts


def single_token(end, pages):
    return Chunk([0], end - 1, pages, sample=False, sampling=SamplingParams())


@st.composite
def steps(draw):
    """Single tokens whose pages are a tree's: each reader goes down some levels, then reads alone."""
    page_size = draw(st.sampled_from([1, 4, 16, 48]))
    depth = draw(st.integers(0, 3))
    levels = [draw(st.integers(1, 3)) for _ in range(depth)]
    next_page, prefixes = 0, [[]]
    for num_pages in levels:
        prefixes.append([*prefixes[-1], *range(next_page, next_page + num_pages)])
        next_page += num_pages
    chunks = []
    for _ in range(draw(st.integers(1, 20))):
        prefix = draw(st.sampled_from(prefixes))
        # One token, pages that are exactly full, and what lies between.
        own = draw(st.one_of(st.sampled_from([1, page_size, 2 * page_size]), st.integers(1, 3 * page_size)))
        end_page = next_page - (-own // page_size)
        chunks.append(single_token(len(prefix) * page_size + own, [*prefix, *range(next_page, end_page)]))
        next_page = end_page
    order = draw(st.permutations(range(next_page)))
    shuffled = [single_token(c.end, [order[page] for page in c.pages]) for c in chunks]
    return page_size, next_page, shuffled


def expected_attention(kv, chunks, query, scaling):
    """Of layer 1, sequence by sequence, in float64."""
    page_size = kv.shape[4]
    group = query.shape[1] // kv.shape[3]
    outputs = []
    for chunk, own in zip(chunks, query.double(), strict=True):
        slots = [(chunk.pages[p // page_size], p % page_size) for p in range(chunk.end)]
        k, v = (
            torch.stack([kv[page, 1, which, :, slot] for page, slot in slots], 1)
            .double()
            .repeat_interleave(group, 0)
            for which in (0, 1)
        )
        scores = torch.einsum("hd,htd->ht", own, k) * scaling
        outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    return torch.stack(outputs)


def forget_what_nobody_knows(kv, chunks):
    """NaN in all slots past the ends."""
    known = torch.zeros(kv.shape[0], kv.shape[4], dtype=torch.bool)
    for chunk in chunks:
        for position in range(chunk.end):
            known[chunk.pages[position // kv.shape[4]], position % kv.shape[4]] = True
    kv.masked_fill_(~known[:, None, None, None, :, None], torch.nan)


@settings(max_examples=40)
@given(
    step=steps(),
    group=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_programs=st.sampled_from([1, 16, 264]),
    seed=st.integers(0, 99),
)
def test_it_computes_what_float64_does(attend_parts, step, group, head_dim, dtype, num_programs, seed):
    page_size, num_pages, chunks = step
    num_kv_heads = 2
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(num_pages, 2, 2, num_kv_heads, page_size, head_dim, generator=generator).to(dtype)
    forget_what_nobody_knows(kv, chunks)
    query = torch.randn(len(chunks), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    view = view_step(kv, chunks, OnDevice(attend_parts, num_kv_heads * group, num_programs)).decode
    output = torch.full_like(query, torch.nan)
    attend_parts(view, query, kv, 1, 0.3, output)
    expected = expected_attention(kv, chunks, query, 0.3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("page_size", [7, 64])
def test_the_runners_own_check_finds_it_right(attend_parts, dtype, page_size):
    kv = torch.zeros(1, 3, 2, 2, page_size, 64, dtype=dtype)
    require_agreement(OnDevice(attend_parts, num_heads=8, num_programs=264), kv)


def test_scores_far_apart_join_without_overflow(attend_parts):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(40, 2, 2, 1, 16, 64, generator=generator)
    kv[17] *= 1000
    chunks = [single_token(40 * 16 - 3, list(range(40)))]
    query = 100 * torch.randn(1, 2, 64, generator=generator)
    view = view_step(kv, chunks, OnDevice(attend_parts, num_heads=2, num_programs=264)).decode
    assert len(view.parts) > 1
    output = torch.empty_like(query)
    attend_parts(view, query, kv, 1, 1.0, output)
    expected = expected_attention(kv, chunks, query, 1.0)
    torch.testing.assert_close(output.double(), expected, atol=0.05, rtol=1e-3)


@pytest.fixture
def views(attend_parts, monkeypatch):
    """Those of the steps; all runners attend by the kernel."""
    recorded = []

    def recording(*args):
        recorded.append(view_step(*args))
        return recorded[-1]

    monkeypatch.setattr(torch_runner, "view_step", recording)
    monkeypatch.setattr(
        torch_runner,
        "choose_in_place",
        lambda kv, num_heads: OnDevice(attend_parts, num_heads, num_programs=16),
    )
    return recorded


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_greedy_output_is_that_of_transformers(architecture, views):
    """Three sequences share a prefix, one is alone; prompts join between decode steps."""
    directory = tiny_checkpoint(architecture)
    runner = TorchRunner(directory, num_pages=64, page_size=16)
    prefix = random_prompt(128, seed=1)
    prompts = [prefix + random_prompt(n, seed=n) for n in (40, 2, 17)] + [random_prompt(75, seed=75)]
    tables = [[*range(8), *range(8 + 6 * i, 14 + 6 * i)] for i in range(3)] + [list(range(63, 50, -1))]
    ids, starts = [list(prompt) for prompt in prompts], [0, 128, 128, 0]
    for step in range(16):
        chunks = []
        for own, start, pages in list(zip(ids, starts, tables, strict=True))[: 1 + step]:
            chunks.append(Chunk(own[start:], start, pages, sample=True, sampling=GREEDY, history=own[:]))
        for i, (chunk, sampled) in enumerate(zip(chunks, runner.run(chunks), strict=True)):
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


# dtype, head_dim, heads to a KV head: with the largest tiles of each type, and with no power of two.
COMPILED = [("bfloat16", 128, 4), ("bfloat16", 256, 8), ("float32", 128, 4), ("float16", 80, 7)]
SHARED_MEMORY_BYTES = 99 << 10  # of a block, on compute capability 8.6 and 8.9; others have more


def printed(program, *arguments, cache):
    """By a process of its own, for what is interpreted cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus_and_fits_into_their_shared_memory(capability, tmp_path):
    kernels = json.loads(
        printed("compile_triton_kernel.py", str(capability), json.dumps(COMPILED), cache=tmp_path)
    )
    assert len(kernels) == 3 * len(COMPILED)
    for kernel in kernels:
        assert kernel["cubin_bytes"] > 0
        assert kernel["shared_bytes"] <= SHARED_MEMORY_BYTES, kernel


def test_it_is_compiled_once_whatever_a_step_looks_like(tmp_path):
    """It takes a second, in which a rank stands still."""
    counts = [int(line) for line in printed("count_triton_kernels.py", cache=tmp_path).split()]
    assert len(counts) == 13
    assert set(counts) == {3}  # of narrow parts, of wide ones, and what joins them
