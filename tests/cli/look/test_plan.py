"""These tests show what `isthmus plan` prints, and what it refuses."""

import math
from dataclasses import replace

import pytest

from router.replay.test_planner import FLEET, conversations
from services.cli.look import plan
from services.cli.look.plan import as_json, format_advice
from services.router.replay.observed import Observation
from services.router.replay.planner import Advice, Goals, Outlook, Size
from services.router.replay.speeds import speeds_of
from services.values.errors import ConfigError, NotFound


def outlook(prefill: int, decode: int, p99_s: float, meets: bool) -> Outlook:
    return Outlook(
        Size(prefill, decode), 0.25, p99_s, 0.02, 0.04, 0.97 if meets else 0.5, 0.4, 0.6, 0.1, meets
    )


def test_what_is_printed(subtests):
    requests = conversations(20, 1.0)
    tried = [outlook(0, 3, 0.5, True), outlook(1, 2, 1.5, True), outlook(2, 2, 1.25, True)]
    speeds = speeds_of(FLEET, requests)
    seen = Observation(FLEET, requests)
    advice = Advice(seen, Goals(2.0, 0.1), 1.0, speeds, tried[2], tried[1], tried[0], tried, ("few",))
    with subtests.test("a table with marks, the verdict, what is lost, and warnings"):
        lines = format_advice(advice).splitlines()
        assert advice.split_loses.endswith("of as many ranks that do both the TTFT p99 is 3.0 times lower")
        assert lines[0].startswith("m: 40 requests in ") and "reused; TTFT p50 " in lines[0]
        assert lines[1] == "goals: TTFT 2.00 s and ITL 100 ms for 0.95 of the requests"
        cells = [line.split() for line in lines]
        shared = ["20", "ms", "40", "ms", "0.970", "40%", "60%"]
        assert ["together", "0", "3", "250", "ms", "500", "ms", *shared] in cells
        assert ["least", "1", "2", "250", "ms", "1.50", "s", *shared] in cells
        assert ["now", "2", "2", "250", "ms", "1.25", "s", *shared] in cells
        assert lines[-3:] == [
            "the least that meet the goals: 1 prefill, 2 decode; now: 2 prefill, 2 decode",
            advice.split_loses,
            "beware: few",
        ]
    with subtests.test("nothing is enough"):
        none = replace(advice, least=None, together=None, load=2.0)
        assert "no number of ranks" in format_advice(none) and "under 2 times" in format_advice(none)
    with subtests.test("JSON has the same"):
        told = as_json(advice)
        assert told["least"]["prefill"] == 1 and told["tried"][2]["ttft_p99_s"] == 1.25
        assert told["split_loses"] == advice.split_loses and told["warnings"] == ["few"]


def test_what_is_refused(subtests, monkeypatch):
    wrong = {
        "ttft_s": (0.0,),
        "itl_ms": (-1.0,),
        "goodput": (1.0,),
        "load": (11.0, math.nan),
        "window_s": (1.0,),
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with (
            subtests.test(name, value=value),
            pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} "),
        ):
            plan.PlanConfig(**{name: value})

    async def nothing(config):
        return [Observation(FLEET, ())]

    monkeypatch.setattr(plan, "observations", nothing)
    with subtests.test("nothing to plan from"), pytest.raises(NotFound, match="nothing to plan from"):
        plan.run([])
