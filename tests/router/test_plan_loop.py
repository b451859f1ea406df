"""A router that plans for goals, and what its metrics then say."""

import logging
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from router.replay.test_planner import FLEET, conversations
from services.router.plan_loop import Planning
from services.router.replay.following import PlannerJob, RankPlan, Steady, plan
from services.router.replay.observed import Observation
from services.router.replay.planner import Goals, Outlook, Size

GOALS = Goals(1.2, 0.1)


def outlook(prefill: int, decode: int, meets: bool = True) -> Outlook:
    return Outlook(Size(prefill, decode), 0.25, 0.5, 0.02, 0.04, 0.97 if meets else 0.5, 0.4, 0.6, 0.1, meets)


def test_fewer_are_wanted_once_fewer_were_enough_for_long(subtests):
    random = Random(1)
    for down_s in (0.0, 3.0, 100.0):
        with subtests.test("the largest of the last seconds, each role by itself", down_s=down_s):
            steady, told = Steady(down_s), [(0, Size(5, 5))]  # These are there at first.
            for now in range(40):
                told.append((now, Size(random.randint(1, 9), random.randint(1, 9))))
                recent = [size for at, size in told if at >= now - down_s]
                most = Size(max(size.prefill for size in recent), max(size.decode for size in recent))
                assert steady.wanted(float(now), told[-1][1], Size(5, 5)) == most
    with subtests.test("what was wanted stays so while no plan came"):
        steady = Steady(100.0)
        for now, size, expected in [
            (0, 5, 5),
            (1_000, 1, 5),
            (1_100, 1, 5),
            (1_101, 3, 3),
            (2_000, 1, 3),
            (3_000, 1, 1),
        ]:
            assert steady.wanted(now, Size(size, size), Size(1, 1)) == Size(expected, expected)


async def test_metrics_follow_the_plans(subtests, caplog):
    caplog.set_level(logging.INFO)
    registry, now = CollectorRegistry(), [0.0]
    model = SimpleNamespace(name="m", registry=registry)
    seen, plans = [Observation(FLEET, ())], []
    load = SimpleNamespace(observation=lambda model: seen[-1])
    models = SimpleNamespace(default=model, others={})
    planning = Planning(models, load, GOALS, 30.0, 100.0, 600.0, 1.1, lambda: now[0])

    async def ask(job: PlannerJob) -> RankPlan:
        assert (job.goals, job.load) == (GOALS, 1.1) and job.observation is seen[-1]
        answer = plans.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    planning.ask = ask

    def wanted() -> tuple[float | None, ...]:
        return tuple(
            registry.get_sample_value("isthmus_plan_wanted_ranks", {"role": role})
            for role in ("prefill", "decode")
        )

    with subtests.test("nothing is said before there is something to plan from"):
        await planning.plan()
        assert wanted() == (None, None)
    with subtests.test("what the plan wants, and what it would give"):
        seen.append(Observation(FLEET, conversations(2, 1.0)))
        plans.append(RankPlan(outlook(2, 2, False), outlook(3, 2)))
        await planning.plan()
        assert wanted() == (3.0, 2.0)
        shares = [
            registry.get_sample_value("isthmus_plan_goodput", {"ranks": each})
            for each in ("present", "wanted")
        ]
        assert shares == [0.5, 0.97]
        assert "ranks_wanted model=m prefill=3 decode=2" in caplog.text
    with subtests.test("fewer only after a while; where nothing is enough the present ranks stay"):
        for at_s, planned, expected in [
            (50.0, RankPlan(outlook(3, 2), outlook(1, 2)), (3.0, 2.0)),
            (90.0, RankPlan(outlook(3, 4, False), None), (3.0, 4.0)),
            (101.0, RankPlan(outlook(3, 2), outlook(1, 2)), (3.0, 4.0)),
            (191.0, RankPlan(outlook(3, 2), outlook(1, 2)), (1.0, 2.0)),
        ]:
            now[0] = at_s
            plans.append(planned)
            await planning.plan()
            assert wanted() == expected
    with subtests.test("a plan that fails is logged, and the age grows"):
        now[0] = 200.0
        plans.append(ValueError("why"))
        await planning.plan()
        assert wanted() == (1.0, 2.0) and "plan_failed model=m reason=why" in caplog.text
        assert registry.get_sample_value("isthmus_plan_age_seconds") == 9.0
    with subtests.test("a defect ends neither the router nor the plans of other models"):
        models.others = {"n": SimpleNamespace(name="n", registry=CollectorRegistry())}
        plans += [RankPlan(outlook(2, 2), outlook(2, 2)), RuntimeError("a defect")]
        await planning.plan()
        assert "plan_broken model=m" in caplog.text and not plans
        assert models.others["n"].registry.get_sample_value("isthmus_plan_wanted_ranks", {"role": "decode"})
        models.others = {}
    with subtests.test("nobody has asked for a whole window"):
        now[0] = 800.0
        seen.append(Observation(FLEET, ()))
        await planning.plan()
        assert wanted() == (1.0, 2.0)  # The last plan was longer ago than fewer have to be enough.
        now[0] = 901.0
        await planning.plan()
        assert wanted() == (1.0, 1.0)


async def test_another_process_plans_and_says_what_it_could_not(monkeypatch):
    job = PlannerJob(Observation(FLEET, conversations(8, 1.0)), GOALS)
    planning = Planning(SimpleNamespace(), SimpleNamespace(), GOALS, 30.0, 100.0, 600.0)
    assert await planning.ask(job) == plan(job)
    with pytest.raises(ValueError, match="no requests"):
        await planning.ask(replace(job, observation=Observation(FLEET, ())))
    for script, error, why in [
        ("exit 0", ValueError, "cannot be read"),
        ("echo hi", ValueError, "cannot be read"),
        ("kill -9 $$", ValueError, "ended with -9"),
        ("exec sleep 60", TimeoutError, "^$"),
    ]:
        monkeypatch.setattr("services.router.plan_loop._COMMAND", ("sh", "-c", script))
        monkeypatch.setattr("services.router.plan_loop._LONGEST_S", 0.1 if "sleep" in script else 30.0)
        with pytest.raises(error, match=why):
            await planning.ask(job)
