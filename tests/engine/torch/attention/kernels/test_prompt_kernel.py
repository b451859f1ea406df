"""The kernel by which prompts attend together runs in Triton's interpreter, and is compiled for GPUs."""

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
from engine.torch.attention.plain_prompts import attend_rows_plainly, gather_plainly
from services.engine.torch.attention.attention_trial import KernelWrong, require_packed
from services.engine.torch.attention.paged_kv import PageShape, Scores
from services.engine.torch.attention.prompts import Packing

# Compiling and interpreting take their time where others compute too.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.002}
SPARE = 3


@pytest.fixture(scope="module")
def attend_rows():
    from services.engine.torch.attention.gpu_attention_kernel import IS_INTERPRETED
    from services.engine.torch.attention.prompt_kernel import attend_rows

    assert IS_INTERPRETED, "TRITON_INTERPRET=1 must be set before anyone imports Triton"
    return attend_rows


def in_order(numbers, by_head):
    return numbers.transpose(0, 1).contiguous().transpose(0, 1) if by_head else numbers


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    head_dims=st.sampled_from([(64, 64), (24, 16), (192, 128), (80, 80), (256, 256), (7, 12)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    window=st.sampled_from([0, 1, 40, 100]),
    softcap=st.sampled_from([None, 2.0, 50.0]),
    has_sinks=st.booleans(),
    by_head=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_computes_what_float64_does(
    attend_rows, lengths, heads, head_dims, dtype, window, softcap, has_sinks, by_head, seed
):
    """There is room behind what the chunks see, which is NaN, and rows of no chunk get 0."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator).to(dtype)

    own, seen = [length for _, length in lengths], [before + length for before, length in lengths]
    total, num_seen = sum(own), sum(seen)
    query, keys = (
        random(total + SPARE, heads[0], head_dims[0]),
        random(num_seen + SPARE, heads[1], head_dims[0]),
    )
    values = random(num_seen + SPARE, heads[1], head_dims[1])
    keys[num_seen:], values[num_seen:] = torch.nan, torch.nan
    ends = [torch.tensor([0, *each], dtype=torch.int32).cumsum(0).int() for each in (own, seen)]
    row_starts, seen_starts = torch.cat([ends[0], ends[0][-1:] + SPARE]), torch.cat([ends[1], ends[1][-1:]])
    sinks = random(heads[0]) if has_sinks else None
    tables = row_starts, seen_starts, total + SPARE, window, Scores(head_dims[0] ** -0.5, softcap, sinks)
    got = attend_rows(*(in_order(each, by_head) for each in (query, keys, values)), *tables)
    expected = attend_rows_plainly(query, keys, values, *tables)
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not got[total:].any()


def test_the_runners_own_check_finds_it_right(attend_rows):
    for page_size, head_dims in ((7, (64, 64)), (64, (48, 32))):
        kv = empty(PageShape(3, 2, page_size, *head_dims), dtype=torch.bfloat16)
        for has_sinks in (False, True):
            require_packed(Packing(gather_plainly, has_sinks, attend_rows), kv, num_heads=4)


def test_the_runners_own_check_can_fail(attend_rows):
    def uncapped(*tables_and_scores):
        *tables, scores = tables_and_scores
        return attend_rows(*tables, Scores(scores.scaling, None, scores.sinks))

    kv = empty(PageShape(3, 2, 16, 64, 64), dtype=torch.bfloat16)
    with pytest.raises(KernelWrong, match=r"softcap=3\.0"):
        require_packed(Packing(gather_plainly, attend=uncapped), kv, num_heads=4)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus(capability, tmp_path):
    """A process of its own compiles, for what is interpreted cannot be compiled."""
    cases = [("bf16", 128, 128), ("bf16", 256, 256), ("fp16", 192, 128), ("fp16", 80, 80), ("bf16", 36, 20)]
    program = Path(__file__).parent / "compile_prompt_kernel.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, str(capability), json.dumps(cases)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) <= 100 << 10, done.stdout
