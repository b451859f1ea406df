"""What bench.router makes of its measurements, and that its decisions still run."""

import pytest

from bench.router import decisions, served


def test_a_request_is_so_much_by_itself_and_so_much_for_each_token():
    kind = {"front": "gRPC, ids", "prompt tokens": 100_000}
    rows = [kind | {"output tokens": n, "ms CPU / request": 10 + 0.1 * n} for n in (16, 128)]
    others = [row | {"prompt tokens": 1_000, "ms CPU / request": 5.0} for row in rows]
    long, short = served.parts([*rows, *others])
    assert (long["ms / request"], long["us / token"]) == (pytest.approx(10), pytest.approx(100))
    assert (short["ms / request"], short["us / token"]) == (5, 0)
    assert [(goal["got"], goal["met"]) for goal in served.goals([long, short])] == [
        (pytest.approx(0.0116), True),
        (pytest.approx(0.0228), True),
        (pytest.approx(0.110), False),
    ]


def test_decisions_are_measured_by_their_parts(monkeypatch):
    for name, value in {
        "LAYOUTS": [(2, 2), (20, 20)],
        "PROMPT_TOKENS": [1_000],
        "_DECISIONS": 12,
        "_REFUSALS": 3,
    }.items():
        monkeypatch.setattr(decisions, name, value)
    monkeypatch.setattr(decisions, "_ENTRIES", 400)
    rows = list(decisions.rows())
    assert [row["ranks"] for row in rows] == [4, 40]
    for row in rows:
        assert 0 < row["match p50"] < row["place p99"]
        assert 0 < row["hash p50"] <= row["hash p99"]
        assert 0 < row["refuse p50"] <= row["refuse p99"]
    assert len(decisions.goals(rows)) == 2
