from dataclasses import replace

import pytest

from bench.chaos.answers import Answer, Asked, Ended, Failure, Front, Span
from bench.chaos.schedule import Fault, Kind, Target
from bench.chaos.verdict import (
    Books,
    Judged,
    Played,
    Run,
    errors_by_status,
    faults_by_kind,
    longest_waits,
    summary,
    verdicts,
    waits,
    wrong_of,
)

pytestmark = pytest.mark.long


ASKED = Asked(1, prompt_ids=(5, 6), max_tokens=3, temperature=0.0, seed=1, front=Front.GRPC)
ANSWER = Answer(
    ASKED, (7, 8, 9), Ended.FINISHED, began_s=10.0, arrivals_s=(10.5, 10.6, 14.6), pulled_tokens=1
)
DEAD = Failure("UNAVAILABLE", "router-0", "UNAVAILABLE: gone", at_s=10.2, router_died=True)
REFUSED = Failure("RESOURCE_EXHAUSTED", "router-1", "RESOURCE_EXHAUSTED: no room", 11.0, router_died=False)
STOPPED = Played(Fault(1.0, Kind.STOP, Target.DECODE_RANK, "decode-0/0", 5.0), Span(9.0, 14.0))
KILLED = Played(Fault(2.0, Kind.KILL, Target.ROUTER, "router-0", 0.5), Span(10.1, 10.6))
CLEAN = Books({}, [], [], [], {})
RUN = Run(
    seconds=60.0,
    judged=[Judged(ANSWER, 0, "")],
    played=[STOPPED, KILLED],
    waves=[Span(9.0, 20.0)],
    unmended=[],
    tracebacks={},
    digest_mismatches=0,
    books=CLEAN,
    read_tokens=16.0,
    shared_tokens=8.0,
)


def judged(answer, wrong=""):
    return Judged(answer, 0, wrong)


def missed(run):
    return {row["goal"] for row in verdicts(summary(run)) if not row["met"]}


LOST = replace(ANSWER, ended=Ended.LOST, tokens=(7,), failures=(REFUSED,))


def test_goals(subtests):
    with subtests.test("a run without a fault of ours meets every goal"):
        assert missed(RUN) == set()
        assert RUN.sentences() == []
    for goal, change, says in [
        ("wrong", {"judged": [judged(ANSWER, "token 1 of 3 is not the one")]}, "token 1 of 3"),
        ("lost", {"judged": [judged(ANSWER), judged(LOST)]}, "after 1 tokens: RESOURCE_EXHAUSTED: no room"),
        ("unmended", {"unmended": ["router-0 is not ready"]}, "not mended: router-0"),
        ("tracebacks", {"tracebacks": {"in decode-0: KeyError": 2}}, "2 times: in decode-0"),
        ("digest_mismatches", {"digest_mismatches": 1}, ""),
        ("left", {"books": replace(CLEAN, ranks={"decode-0/0": "4 quarantined"})}, "rank decode-0/0: 4"),
        ("left", {"books": replace(CLEAN, in_etcd=["lease 77"])}, "in etcd: lease 77"),
        ("left", {"books": replace(CLEAN, processes=["12: python"])}, "process 12"),
        ("left", {"books": replace(CLEAN, shared_memory=["/dev/shm/x"])}, "shared memory /dev/shm/x"),
        ("left", {"books": replace(CLEAN, exits={"prefill-0": -9})}, "prefill-0 ended with exit code -9"),
        ("pulled_tokens", {"judged": [judged(replace(ANSWER, pulled_tokens=0))]}, ""),
        ("read_tokens", {"read_tokens": 0.0}, ""),
        ("shared_tokens", {"shared_tokens": 0.0}, ""),
        ("faults", {"played": []}, ""),
    ]:
        with subtests.test(
            "each fault of ours misses its goal and has its sentence", goal=goal, change=change, says=says
        ):
            run = replace(RUN, **change)
            assert missed(run) == {goal}
            assert says in "\n".join(run.sentences())
    with subtests.test("who has no answer has pulled nothing either"):
        assert missed(replace(RUN, judged=[])) == {"answers", "pulled_tokens"}
    with subtests.test("a retry after the death of its router is no loss"):
        retried = replace(ANSWER, failures=(DEAD, DEAD))
        run = replace(RUN, judged=[judged(retried), judged(LOST)])
        row = summary(run)
        assert (row["retried"], row["lost"], row["answers"]) == (2, 1, 1)
        assert errors_by_status(run.failures) == [
            {"status": "RESOURCE_EXHAUSTED", "retried": 0, "lost": 1},
            {"status": "UNAVAILABLE", "retried": 2, "lost": 0},
        ]
    with subtests.test("what is wrong with an answer"):
        assert wrong_of(ANSWER, None, None, ()) == ""
        assert wrong_of(ANSWER, 1, None, ()) == "token 1 of 3 is not the one"
        assert "other tokens" in wrong_of(replace(ANSWER, contradicts=True), None, None, ())
        short = replace(ANSWER, tokens=(7, 8))
        assert wrong_of(short, None, None, ()) == "ended after 2 tokens of 3"
        assert wrong_of(replace(short, ended=Ended.CANCELLED), None, None, ()) == ""
        assert wrong_of(replace(short, ended=Ended.LOST), None, None, ()) == ""
        assert "4 tokens where 3" in wrong_of(replace(ANSWER, tokens=(7, 8, 9, 1)), None, None, ())
    with subtests.test("what is asked again may part at a near tie alone"):
        again = replace(ANSWER, asked=replace(ASKED, number=2, again=1), tokens=(7, 4, 4))
        assert wrong_of(again, None, ANSWER, ()) == "token 1 differs from the first answer's"
        assert wrong_of(again, None, ANSWER, {1}) == ""
        assert wrong_of(replace(again, tokens=(7, 8, 9)), None, ANSWER, ()) == ""


def test_faults_and_waits(subtests):
    with subtests.test("faults are counted by kind"):
        rows = {row["target"]: (row["kill"], row["stop"]) for row in faults_by_kind(RUN.played)}
        assert rows == {
            "prefill rank": (0, 0),
            "decode rank": (0, 1),
            "supervisor": (0, 0),
            "router": (1, 0),
            "etcd member": (0, 0),
            "tier's file": (0, 0),
        }
    with subtests.test("waits are told apart by what was done meanwhile"):
        stop = Played(Fault(3.0, Kind.STOP, Target.ROUTER, "router-1", 9.0), Span(12.0, 15.0))
        held_up = replace(ANSWER, began_s=12.5, arrivals_s=(15.0, 15.5), routers=frozenset({"router-1"}))
        quiet = replace(ANSWER, began_s=30.0, arrivals_s=(30.25, 30.5))
        rows = waits(replace(RUN, judged=[judged(a) for a in (ANSWER, held_up, quiet)], played=[stop]))
        found = {(row["what"], row["when"]): (row["count"], row["max_s"]) for row in rows}
        assert found == {
            ("first token", "own router stopped"): (1, 2.5),
            ("first token", "during faults"): (1, 0.5),
            ("first token", "otherwise"): (1, 0.25),
            ("gap", "own router stopped"): (1, 0.5),
            ("gap", "during faults"): (2, 4.0),
            ("gap", "otherwise"): (1, 0.25),
        }
    with subtests.test("the longest wait names what was done meanwhile"):
        (row,) = longest_waits(RUN, count=1)
        assert (row["lasts_s"], row["what"], row["answer"]) == (4.0, "gap", 1)
        assert row["faults"] == "stop decode-0/0 (-1.6 s, 5.0 s), kill router-0 (-0.5 s, 0.5 s)"
    with subtests.test("a cluster that mends itself is timed from the end of its last fault"):
        assert summary(RUN)["mended_max_s"] == 6.0
