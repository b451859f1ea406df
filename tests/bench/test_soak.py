from collections import Counter
from random import Random

import pytest

from bench.soak import __main__ as soak
from bench.soak import ranks as soak_ranks
from bench.soak.load import QUIET_ABORTS, Outcomes, Soak, late_share

pytestmark = pytest.mark.long


PASSED = {
    "errors": 0,
    "books_balanced": True,
    "memory_growth": 1.05,
    "quiet_aborts": 20,
    "abort_max_s": 0.4,
    "late_share": 0.004,
    "asked_again": 60,
    "answered_otherwise": 0,
}
MISSED = {
    "errors": 1,
    "books_balanced": False,
    "memory_growth": 1.2,
    "quiet_aborts": 19,
    "abort_max_s": 2.1,
    "late_share": 0.02,
    "asked_again": 0,
    "answered_otherwise": 1,
}
GOALS = (*soak.GOALS, *soak.GOALS_ASKED_AGAIN)


class Holding(soak.Ranks):
    """Ranks that hold something for so many looks."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    async def held(self):
        self.looks -= 1
        return float(max(0, self.looks))


async def test_who_never_lets_go_is_not_waited_for_for_ever(monkeypatch):
    assert await Holding(3).let_go() < 60
    monkeypatch.setattr(soak_ranks, "LET_GO_S", 0.0)
    with pytest.raises(TimeoutError, match="still hold 9 pages and requests"):
        await Holding(10).let_go()


class Abortable(Soak):
    """Requests of which every second one ends before its client aborts it."""

    def __init__(self):
        super().__init__(None, Holding(1), Random(1), None)
        self.asked = 0

    async def ask(self, asked, outcomes, abort_after_s):
        self.asked += 1
        return self.asked % 2 == 0


async def test_goals_of_a_soak(subtests):
    for goal in [name for name, _, _ in GOALS]:
        for got in ["too much or too little", "nothing was measured"]:
            with subtests.test("verdicts say what was missed", goal=goal, got=got):
                assert [each["met"] for each in soak.verdicts(PASSED, "torch")] == [True] * len(GOALS)
                row = PASSED | {goal: None if got == "nothing was measured" else MISSED[goal]}
                assert [each["goal"] for each in soak.verdicts(row, "torch") if not each["met"]] == [goal]
    with subtests.test("where every token is checked nothing is asked again"):
        assert all(each["met"] for each in soak.verdicts(PASSED | {"asked_again": 0}, "fake"))
    with subtests.test("refusals and aborts thin out no late requests"):
        load = Outcomes(
            counts=Counter(answered=60, deadline_exceeded=20, resource_exhausted=500, aborted=100)
        )
        warm = Outcomes(counts=Counter(answered=10, deadline_exceeded=10))
        assert late_share((warm, load)) == 0.3
        assert late_share((Outcomes(counts=Counter(resource_exhausted=9)),)) is None
    with subtests.test("only requests that were under way count as aborted"):
        driver = Abortable()
        assert len(await driver.quiet_aborts(Outcomes())) == QUIET_ABORTS
        assert driver.asked == 2 * QUIET_ABORTS
    with subtests.test("ranks whose metrics nobody found hold more than nothing"):
        ranks = soak.Ranks()
        ranks.note("decode", "rank_started rank=0 pid=1")
        with pytest.raises(RuntimeError, match="of 1 ranks 0 have a page of metrics"):
            await ranks.held()
    with subtests.test("tracebacks are counted and kept whole and restarts too"):
        ranks = soak.Ranks()
        ranks.note("decode", "rank_started rank=0 pid=1")
        for _ in range(2):
            ranks.note("decode", "Traceback (most recent call last):")
            ranks.note("router", "request_finished outcome=finished")
            ranks.note("decode", '  File "x.py", line 1, in f')
            ranks.note("decode", "ValueError: no")
            ranks.note("decode", "rank_started rank=0 pid=2")
        text = 'in decode:\nTraceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no'
        assert ranks.tracebacks == {text: 2}
        assert (ranks.restarts, ranks.pids) == (2, {"decode/0": 2})
