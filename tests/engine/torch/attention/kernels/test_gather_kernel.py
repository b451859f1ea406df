"""The kernel that gathers for prompts runs in Triton's interpreter, and is compiled for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.attention.paging import empty
from engine.torch.attention.plain_prompts import gather_plainly, varlen_plainly
from services.engine.torch.attention import prompts
from services.engine.torch.attention.attention_trial import require_gathered, require_packed
from services.engine.torch.attention.page_pieces import Read
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.prompts import Packing, PlacedRead, pack_chunks

# Compiling and interpreting take their time where others compute too.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def gather_pages():
    from services.engine.torch.attention import gather_kernel

    assert not hasattr(gather_kernel._gather_page, "device_caches"), "TRITON_INTERPRET=1 must be set before"
    return gather_kernel.gather_pages


@st.composite
def reads_of_chunks(draw, page_size):
    spans = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=4))
    counts = [-(-(start % page_size + length) // page_size) for start, length in spans]
    pages = draw(st.permutations(range(sum(counts))))
    return [
        Read([pages.pop() for _ in range(count)], start // page_size, start % page_size, length)
        for (start, length), count in zip(spans, counts, strict=True)
    ]


@settings(max_examples=25)
@given(
    data=st.data(),
    page_size=st.sampled_from([1, 7, 16, 64]),
    head_dims=st.sampled_from([(8, 8), (128, 128), (80, 80), (256, 256), (24, 16), (72, 0)]),
    dtypes=st.sampled_from(
        [
            (torch.bfloat16, None),
            (torch.float16, None),
            (torch.float32, None),
            (torch.float8_e4m3fn, torch.bfloat16),
            (torch.float8_e4m3fn, torch.float16),
        ]
    ),
    layer=st.integers(0, 2),
)
def test_it_copies_what_chunks_read_and_nothing_else(gather_pages, data, page_size, head_dims, dtypes, layer):
    reads = data.draw(reads_of_chunks(page_size))
    num_pages = sum(len(read.pages) for read in reads)
    shape = PageShape(3, 2, page_size, *head_dims)
    numbers = torch.randn(num_pages * shape.page_numbers, generator=torch.Generator().manual_seed(layer))
    kv = PagedKv(numbers.to(dtypes[0]), shape, dtypes[1])
    offsets = [sum(read.num_tokens for read in reads[:i]) for i in range(len(reads))]
    placed = [PlacedRead(at, read.num_tokens, read) for at, read in zip(offsets, reads, strict=True)]
    (call,) = pack_chunks(placed, kv, Packing(gather_pages), 0).calls
    expected = gather_plainly(call.reads, call.num_seen, kv, layer)
    for got, plain in zip(gather_pages(call.reads, call.num_seen, kv, layer), expected, strict=True):
        assert torch.equal(got, plain)


@pytest.mark.parametrize("page_size", [7, 64])
def test_the_runners_own_check_finds_it_right(gather_pages, page_size, monkeypatch):
    monkeypatch.setattr(prompts, "varlen_attn", varlen_plainly)
    kv = empty(PageShape(3, 2, page_size, 64, 64), dtype=torch.bfloat16)
    require_gathered(gather_pages, kv)
    for has_sinks in (False, True):
        require_packed(Packing(gather_pages, has_sinks), kv, num_heads=8)


def test_it_compiles_for_gpus(tmp_path):
    """A process of its own compiles, for what is interpreted cannot be compiled."""
    cases = [
        (capability, *case)
        for capability in (80, 90, 100)
        for case in (
            ("bf16", "bf16", 64, 128, 128),
            ("bf16", "bf16", 1, 256, 256),
            ("fp16", "fp16", 7, 80, 80),
            ("fp32", "fp32", 48, 64, 96),
            ("bf16", "bf16", 64, 576, 0),
        )
    ]
    cases += [(capability, "fp8e4nv", "bf16", 64, 128, 128) for capability in (90, 100)]  # 80 cannot widen it
    program = Path(__file__).parent / "compile_gather_kernel.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, json.dumps(cases)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) <= 48 << 10
