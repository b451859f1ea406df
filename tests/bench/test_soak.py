import pytest

from bench import soak, soak_ranks

PASSED = {
    "errors": 0,
    "books_balanced": True,
    "memory_growth": 1.05,
    "abort_max_s": 0.4,
    "late_share": 0.004,
}
MISSED = {
    "errors": 1,
    "books_balanced": False,
    "memory_growth": 1.2,
    "abort_max_s": 2.1,
    "late_share": 0.02,
}


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


@pytest.mark.parametrize("goal", [name for name, _, _ in soak.GOALS])
def test_verdicts_say_what_was_missed(goal):
    assert [each["met"] for each in soak.verdicts(PASSED)] == [True] * len(soak.GOALS)
    row = PASSED | {goal: MISSED[goal]}
    assert [each["goal"] for each in soak.verdicts(row) if not each["met"]] == [goal]


def test_tracebacks_are_counted_and_kept_whole_and_restarts_too():
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
