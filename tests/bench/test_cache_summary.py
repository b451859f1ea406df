import math

import pytest

from bench.decode_cache.load import RankSample, Run, Turn
from bench.decode_cache.summary import figures, percentile, ratios, verdicts, worst
from bench.decode_cache.workload import Conversation, Workload
from services.values.rank import Plan
from services.values.request import Admitted

pytestmark = pytest.mark.long


def admitted(moved=100, computed=10, plan=Plan.REMOTE):
    return Admitted(
        prompt_tokens=20,
        decode_prefix_len=0,
        prefill_prefix_len=10,
        computed_tokens=computed,
        kv_bytes_moved=moved,
        kv_bytes_prompt=200,
        decode_queue_s=0.0,
        prefill_queue_s=0.0,
        prefill_compute_s=0.1,
        transfer_s=0.0,
        plan=plan,
    )


def a_turn(sent_s, ttft_s, gap_s, count=3, **fields):
    times = [sent_s + ttft_s + i * gap_s for i in range(count)]
    return Turn(sent_s, times, list(range(count)), admitted(**fields))


def a_run(*turns, concurrency=1, ramp=1, samples=()):
    conversations = (Conversation("c", ((1, 2),), 3),) * len(turns)
    return Run(Workload("w", conversations, concurrency, ramp, None), list(turns), list(samples))


def a_side(ttft_s=1.0, gap_s=0.5, running=4, **fields):
    samples = [RankSample(0.5, 99, 0, 1.0), RankSample(3.0, running, 0, 0.9), RankSample(99.0, 99, 0, 1.0)]
    turns = [a_turn(2.0 * i, ttft_s, gap_s, **fields) for i in range(4)]
    return a_run(*turns, samples=samples)


def test_figures_of_a_run(subtests):
    for share, expected in [(0.0, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4), (0.99, 4), (1.0, 4)]:
        with subtests.test("percentiles", share=share, expected=expected):
            assert percentile([4, 1, 3, 2], share) == expected
    with subtests.test("figures leave out the ramp and what is outside of the window"):
        row = figures([a_side()])
        # Sent at 0 (the ramp), 2, 4 and 6; tokens 1, 1.5 and 2 seconds later; the window is from 2 to 6.
        assert (row["turns"], row["rejected"]) == (3, 0)
        assert (row["ttft_p50"], row["itl_p50"]) == (1.0, 0.5)
        assert row["throughput"] == 7 / 4  # at 2, 3, 3.5, 4, 5, 5.5 and 6
        assert (row["kv_bytes_moved"], row["computed_tokens"], row["local_share"]) == (300, 30, 0)
        assert (row["running_p50"], row["pool_used_p50"]) == (4, 0.9)
    with subtests.test("a short run counts to its end"):
        run = a_run(a_turn(0.0, 1.0, 0.5), a_turn(2.0, 1.0, 0.5), samples=[RankSample(3.0, 1, 0, 0.1)])
        assert figures([run])["throughput"] == 4 / 2
    with subtests.test("rejected turns are counted and measured nowhere"):
        run = a_side()
        run.turns.insert(2, Turn(3.0, rejected=True))
        assert (figures([run])["turns"], figures([run])["rejected"]) == (3, 1)
    with subtests.test("ratios point the way that the issue says"):
        on = figures([a_side(ttft_s=0.5, gap_s=0.25, running=8, moved=25, computed=10)])
        off = figures([a_side(ttft_s=1.0, gap_s=0.5, running=4, moved=100, computed=20)])
        row = ratios(on, off)
        assert (row["ttft_p50_ratio"], row["ttft_p99_ratio"], row["kv_bytes_moved_ratio"]) == (2, 2, 4)
        assert (row["itl_p50_ratio"], row["itl_p99_ratio"], row["computed_tokens_ratio"]) == (0.5, 0.5, 0.5)
        assert (row["running_p50_on"], row["running_p50_off"], row["rejected"]) == (8, 4, 0)
    with subtests.test("retractions are told of each side"):
        on, off = a_side(), a_side()
        off.retractions = 3
        row = ratios(figures([on]), figures([off, off]))
        assert (row["retractions_on"], row["retractions_off"]) == (0, 6)
    with subtests.test("a pool that held as many as it was made for"):
        samples = [RankSample(3.0, 9, 23, 0.96)]
        off = a_run(*(a_turn(2.0 * i, 1.0, 0.5) for i in range(70)), concurrency=32, samples=samples)
        met = {v["goal"]: v["met"] for v in verdicts("shared", ratios(figures([off]), figures([off])))}
        assert met["pool_used_p50_off"] and met["running_share_off"]
    with subtests.test("nothing moved on either side is no difference"):
        nothing, some = figures([a_side(moved=0)]), figures([a_side(moved=5)])
        assert ratios(nothing, nothing)["kv_bytes_moved_ratio"] == 1
        assert ratios(nothing, some)["kv_bytes_moved_ratio"] == math.inf
    with subtests.test("the worst cell is the one that speaks against the cache"):
        fast, slow = figures([a_side(ttft_s=0.5, gap_s=0.25)]), figures([a_side(ttft_s=1.0, gap_s=0.5)])
        row = worst([ratios(fast, slow), ratios(slow, fast)])
        assert (row["ttft_p50_ratio"], row["itl_p50_ratio"]) == (0.5, 2)
    with subtests.test("verdicts say what was met"):
        row = ratios(figures([a_side()]), figures([a_side()]))
        met = {verdict["goal"]: verdict["met"] for verdict in verdicts("shared", row)}
        assert met == {
            "ttft_p50_ratio": False,
            "throughput_ratio": False,
            "itl_p50_ratio": True,
            "pool_used_p50_off": False,
            "running_share_off": False,
            "rejected": True,
        }
        assert all(verdict["met"] for verdict in verdicts("idle", row))
