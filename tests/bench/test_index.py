"""These tests show what bench.index measures with, and that it still fits to what it measures."""

import asyncio
import time

import pytest

from bench.index import cluster, followed
from bench.index.followed import TimedIndex, TimedSelector
from bench.index.goals import verdicts
from bench.index.simulated_ledger import SimulatedLedger
from services.values.rank import Generation, RankId

pytestmark = pytest.mark.long


RANK = RankId("w", 0, Generation(1))


class Rank:
    """A simulated rank whose clock is behind by 100 s, and an index that gets what it tells."""

    def __init__(self):
        self.now_s = time.monotonic() - 100
        self.ledger = SimulatedLedger(600.0, 1000, lambda: self.now_s, 1)
        self.index = TimedIndex()
        self.tell_snapshot()
        self.index.begin()

    def tell_snapshot(self):
        self.index.take_snapshot(RANK, self.ledger.take_snapshot().stored)
        self.ledger.reported()

    def tell_delta(self):
        delta = self.ledger.take_delta(1 << 16)
        assert self.index.apply_delta(RANK, delta.stored, delta.removed)
        self.ledger.reported()


def test_staleness(subtests):
    with subtests.test("deltas and snapshots are as old as the first they tell"):
        rank = Rank()
        rank.now_s += 0.5
        rank.tell_delta()
        rank.now_s += 0.25
        rank.tell_snapshot()
        assert rank.index.delta_ages_s[0] >= 100 and rank.index.snapshot_ages_s[0] >= 99.5
        assert rank.index.delta_ages_s[0] > rank.index.snapshot_ages_s[0]
        assert rank.index._num_new == 300 + 150
        assert rank.index.total_blocks == 1000
    with subtests.test("what a failed write was to tell keeps its age"):
        rank = Rank()
        rank.now_s += 0.5
        rank.ledger.take_delta(1 << 16)
        rank.ledger.forget_reported()
        rank.now_s += 0.25
        assert rank.ledger.age_s(rank.now_s) == pytest.approx(0.75)
        rank.tell_snapshot()
        assert rank.index.snapshot_ages_s[0] >= 100
    with subtests.test("the longest turn of a loop is seen"):
        turns = TimedSelector()

        async def busy():
            turns.begin()
            began = time.thread_time()
            while time.thread_time() - began < 0.02:
                pass
            await asyncio.sleep(0)
            return turns.longest_turn_s

        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
            assert runner.run(busy()) >= 0.02
    with (
        subtests.test("nothing told is no staleness of nothing"),
        pytest.raises(RuntimeError, match="no staleness was measured"),
    ):
        followed._percentiles("staleness", [])
    with subtests.test("the worst row is judged"):
        rows = [{"prompt blocks": 128, "p50 us": figure, "cold p50 us": figure} for figure in (13.0, 60.0)]
        rows.append({"prompt blocks": 8192, "p99 us": 70.0, "cold p99 us": 700.0})
        assert [(one["goal"], one["got"], one["met"]) for one in verdicts("match", rows)] == [
            ("match p50 us, 128 blocks", 60.0, False),
            ("match p50 us, 128 blocks, cold", 60.0, False),
            ("match p99 us, 8192 blocks", 70.0, True),
            ("match p99 us, 8192 blocks, cold", 700.0, False),
        ]


async def test_a_mirror_follows_simulated_ranks(monkeypatch):
    monkeypatch.setattr(cluster, "_WARM_UP_S", 1.0)
    row = await cluster.publishers_row(4, 0.03, 500, cluster.WRITES_PER_S)
    assert row["entries"] == 4 * 500
    assert row["p99 ms"] >= row["p50 ms"] > 0 and row["told p50 ms"] > 0
    assert row["blocks/s"] > 0 and row["writes/s"] > 0 and row["stall ms"] > 0
    assert len(verdicts("64 publishers", [row])) == 4
