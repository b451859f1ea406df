"""The kernels that draw: in Triton's interpreter; compiled, not run, for GPUs (make test-triton)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.sampling.plain_draws import is_near, plain_choice
from services.engine.torch.sampling.device_sampler import fields_of

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

STRIPES = (32, 128, 4096)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = ("peaked", "flat", "equal", "ties", "mostly forbidden", "one", "far", "broken")


@pytest.fixture(scope="module")
def kernels():
    from services.engine.torch.sampling import draw_kernels

    assert not hasattr(draw_kernels._settle, "device_caches"), "TRITON_INTERPRET=1 must be set before"
    return draw_kernels


def random_logits(size, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64)
    if kind == "one":
        rows, ids = torch.arange(size[0]), torch.randint(size[1], (size[0],), generator=generator)
        logits = torch.full(size, -torch.inf, dtype=torch.float64)
        logits[rows, ids] = 3.0
    if kind == "broken":
        for row, value in enumerate((torch.inf, torch.nan, -torch.inf)):
            logits[row::3, size[1] // 2 :] = value
        logits[2::3] = -torch.inf
    return {
        "peaked": logits * 6,
        "flat": logits * 0.01,
        "equal": torch.zeros_like(logits),
        "ties": (logits * 4).round() / 4,
        "mostly forbidden": torch.where(logits > 1, logits, -torch.inf),
        "far": logits * 3e4,
    }.get(kind, logits)


TABLES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 1.0, 0.3, 5.0, 100.0, 1e-3, 1e-40]),
        st.sampled_from([1.0, 0.9, 0.5, 0.999999, 1e-9]) | st.floats(1e-3, 1),
        st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        st.floats(0, 1),
        st.sampled_from([0, 0, 0, 1, 2, 7, 60]),
    ),
    min_size=1,
    max_size=12,
)


def drawn(kernels, logits, table, stripe):
    num_rows, vocab_size = len(table), logits.shape[1]
    scratch = kernels.Scratch.of(num_rows + 1, vocab_size, logits.device, stripe)
    for each in (scratch.bounds, scratch.sums, scratch.candidates, scratch.cuts, scratch.kept):
        each.fill_(77)  # what an earlier launch left
    chosen = torch.full((num_rows,), 77)
    cuts = any(row[5] > 0 or row[2] < 1 for row in table)
    kernels.launch(
        logits, torch.tensor(table, dtype=torch.float64), chosen, scratch, cuts=cuts, stripe=stripe
    )
    return chosen.tolist()


@settings(max_examples=35)
@given(
    table=TABLES,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    vocab_size=st.sampled_from([2, 50, 257, 1000]),
    stripe=st.sampled_from(STRIPES),
    seed=st.integers(0, 999),
)
def test_they_choose_what_a_row_alone_does_by_definition(
    kernels, table, kind, dtype, vocab_size, stripe, seed
):
    # Rows choose in another order than they lie, and some lie between them.
    stripe = max(stripe, vocab_size // 4)
    stripe = 1 << (stripe - 1).bit_length()
    logits = random_logits((len(table) + 3, vocab_size + 5), kind, seed).to(dtype)[:, :vocab_size]
    rows = [
        fields_of(len(table) - nth, temperature, top_p, min_p, point, top_k if top_k < vocab_size else 0)
        for nth, (temperature, top_p, min_p, point, top_k) in enumerate(table)
    ]
    for fields, found in zip(rows, drawn(kernels, logits, rows, stripe), strict=True):
        assert found == plain_choice(logits, *fields) or is_near(logits, fields, found), fields


def test_a_row_chooses_the_same_whoever_shares_its_launch(kernels):
    logits = random_logits((6, 500), "peaked", 1).float()
    rows = [fields_of(row, 1.0, 0.9 if row % 2 else 1.0, 0.0, 0.7, row % 3 * 5) for row in range(6)]
    together = drawn(kernels, logits, rows, 128)
    assert together == [
        drawn(kernels, logits, [row], stripe)[0] for row, stripe in zip(rows, [64, 512] * 3, strict=True)
    ]


def test_the_runners_own_trial_finds_them_right(kernels):
    from services.engine.torch.sampling.device_sampler import DeviceSampler, require_same_choices

    require_same_choices(DeviceSampler(torch.device("cpu"), 100), torch.bfloat16)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_are_compiled_once_for_each_dtype_whatever_is_drawn(capability, tmp_path):
    """It takes seconds, in which a rank stands still: so that is at the start."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "count_draw_kernels.py", str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [6] * 5 + [12] * 5
