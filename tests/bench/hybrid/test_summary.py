"""These tests show which figures meet the goals, and that bytes are held against the formula."""

from dataclasses import replace

import pytest

from bench.hybrid.summary import expected_bytes, verdicts
from services.engine.fake import fake_state, fake_window
from services.values.kv import GroupKind, KvGroup, KvLayout
from services.values.rank import Plan
from services.values.request import Admitted

pytestmark = pytest.mark.long


FULL = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 1, "uint64")
LAYOUT = KvLayout(4, 32, 1, groups=(FULL, replace(fake_window(6), unit_bytes=32), fake_state(3)))
ADMITTED = Admitted(
    prompt_tokens=18,
    decode_prefix_len=8,
    prefill_prefix_len=0,
    computed_tokens=18,
    kv_bytes_moved=0,
    kv_bytes_prompt=0,
    decode_queue_s=0.0,
    prefill_queue_s=0.0,
    prefill_compute_s=0.0,
    transfer_s=0.0,
    plan=Plan.REMOTE,
)


def shortage(carried_tokens, ttft, throughput):
    return {"carried_tokens": carried_tokens, "ttft_p50_ratio": ttft, "throughput_ratio": throughput}


def test_a_summary_of_hybrid_models(subtests):
    with subtests.test("bytes are the delta tails and one state"):
        # Pages 2, 3 and 4; of the window positions 13 to 17 in two pages; three values of a state.
        assert expected_bytes(ADMITTED, LAYOUT) == 3 * 32 + 2 * 32 + 24
        assert (
            expected_bytes(replace(ADMITTED, prompt_tokens=16, decode_prefix_len=16), LAYOUT) == 2 * 32 + 24
        )
        assert expected_bytes(replace(ADMITTED, plan=Plan.LOCAL), LAYOUT) == 0
    for changes, missed in [
        ({}, []),
        ({"sides": [{"wrong_bytes": 1, "rejected": 0}]}, ["turns whose bytes are not the formula's"]),
        ({"shortage": [shortage(499, 3.9, 1.2)]}, ["TTFT p50, light states", "throughput, light states"]),
        (
            {"shortage": [shortage(100, 5.0, 2.0), shortage(3000, 1.0, 1.0)]},
            [],
        ),  # a heavy state may cost that
    ]:
        with subtests.test("what is missed", changes=changes, missed=missed):
            figures = {
                "sides": [{"wrong_bytes": 0, "rejected": 0}],
                "shortage": [shortage(100, 4.0, 1.3)],
            } | changes
            assert [row["goal"] for row in verdicts(**figures) if not row["met"]] == missed
