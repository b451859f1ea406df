"""Replays tell what decode has of a prompt, and what is lost where few checkpoints are kept."""

import pytest

from bench.hybrid.models import fake_hybrid, fake_windowed
from bench.hybrid.workload import conversations, documents
from engine.paged.core.replayed_books import computed_rows, hit_row, mixed, pages_for, points_in_use

pytestmark = pytest.mark.long


PAGE_SIZE = 16
MODELS = [fake_hybrid(100), fake_windowed(48, PAGE_SIZE)]


def test_few_checkpoints_cost_computing_and_one_for_each_that_comes_back_nearly_none():
    workload = mixed(1)
    rows = computed_rows(MODELS[0], workload, pages_for(workload, 64), 64, seed=1)
    computed = [row["computed_tokens"] for row in rows]
    assert computed == sorted(computed, reverse=True) and computed[0] > 1.3 * computed[-1]
    assert [row["enough"] for row in rows] == [False, False, True, True]
    assert rows[2]["points"] == points_in_use(workload) == rows[2]["come_back"]
    assert rows[2]["of_unlimited"] <= 1.1


def test_hits(subtests):
    for model in MODELS:
        for make in [conversations, mixed, lambda seed, quick: documents(seed, 256, quick)]:
            with subtests.test("decode hits what attention alone would", model=model, make=make):
                workload = make(1, quick=True)
                num_pages = pages_for(workload, PAGE_SIZE)
                row = hit_row(model, workload, num_pages, PAGE_SIZE, seed=1)
                assert row == hit_row(model, workload, num_pages, PAGE_SIZE, seed=1)
                assert row["per_group"] == row["attention_alone"] > 0
                assert 0 <= row["least_of_all"] <= row["per_group"] < row["prompt_tokens"]
    # A decode rank has a state where answers ended, and tails there, and nowhere else.
    with subtests.test("the least of all groups has nothing of a shared document"):
        workload = documents(1, 256, quick=True)
        row = hit_row(MODELS[0], workload, pages_for(workload, PAGE_SIZE), PAGE_SIZE, seed=1)
        assert row["least_of_all"] == 0
    with subtests.test("points in use"):
        assert points_in_use(conversations(1, quick=True)) == 4
        assert points_in_use(documents(1, 256, quick=True)) == 4  # a document each
