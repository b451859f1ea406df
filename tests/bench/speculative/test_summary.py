"""Ratios of rounds, and which of them are goals."""

import pytest

from bench.speculative.measure import Answer, Run
from bench.speculative.summary import Counts, goals, row

pytestmark = pytest.mark.long


def run(seconds, hit=16, last_id=9):
    return Run([Answer([1, 2, last_id], 1.0, 1.0 + seconds, 20, hit)], 1)


def test_a_summary_of_drafts(subtests):
    with subtests.test("each round is compared with its own"):
        made = row("agrees", 1, "draft", [run(1.0), run(4.0)], [run(0.5), run(1.0)], Counts(10, 8))
        assert made["ratio"] == pytest.approx(3.0) and made["itl_ratio"] == pytest.approx(0.375)
        assert made["acceptance"] == 0.8 and made["same_texts"] == 1 and made["same_hits"]
    for changed, goal in [({"last_id": 8}, "texts"), ({"hit": 0}, "hits")]:
        with subtests.test("what is lost misses its goal", changed=changed, goal=goal):
            made = row("agrees", 1, "draft", [run(1.0)], [run(0.4, **changed)], Counts())
            missed = [str(each["goal"]) for each in goals([made]) if not each["met"]]
            assert len(missed) == 1 and missed[0].startswith(goal)
    for case, batch, ratio, met in [
        ("agrees", 1, 1.9, False),
        ("agrees", 1, 2.1, True),
        ("never", 1, 0.98, True),
        ("never", 1, 0.9, False),
        ("agrees", 16, 0.98, True),
        ("agrees", 16, 0.96, False),
    ]:
        with subtests.test(
            "speed is a goal where drafts are right or never are",
            case=case,
            batch=batch,
            ratio=ratio,
            met=met,
        ):
            made = row(case, batch, "draft", [run(1.0)], [run(1.0 / ratio)], Counts())
            assert goals([made])[0]["met"] is met
