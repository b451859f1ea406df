"""These tests show what bench.router makes of its measurements, and that its decisions still run."""

import pytest

from bench.router import decisions, saturated, served
from bench.router.asked import Asked, Prompts

pytestmark = pytest.mark.long


def test_measuring_a_router(subtests, monkeypatch):
    with subtests.test("a request is so much by itself and so much for each token"):
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
    with subtests.test("decisions are measured by their parts"), monkeypatch.context() as patch:
        for name, value in {
            "LAYOUTS": [(2, 2), (20, 20)],
            "PROMPT_TOKENS": [1_000],
            "_DECISIONS": 12,
            "_REFUSALS": 3,
        }.items():
            patch.setattr(decisions, name, value)
        patch.setattr(decisions, "_ENTRIES", 400)
        rows = list(decisions.rows())
        assert [row["ranks"] for row in rows] == [4, 40]
        for row in rows:
            assert 0 < row["match p50"] < row["place p99"]
            assert 0 < row["hash p50"] <= row["hash p99"]
            assert 0 < row["refuse p50"] <= row["refuse p99"]
        assert len(decisions.goals(rows)) == 2
    with subtests.test("a token is the slope and a request the rest by process"):
        kind = {"front": "grpc", "streams": 32, "prompt": 100}
        rows = [
            kind
            | {
                "answer": n,
                "router ms": 1 + 0.05 * n,
                "decode ms": 2.0,
                "req/s": 100 / n,
                "tokens/s": 100.0 + n,
            }
            for n in (1, 64, 256)
        ]
        alone = rows[0] | {"streams": 1}  # of one length no slope can be told
        (part,) = saturated.parts([*rows, alone], ("router", "decode"))
        assert part["router ms/request"] == pytest.approx(1) and part["router us/token"] == pytest.approx(50)
        assert part["decode ms/request"] == pytest.approx(2) and part["decode us/token"] == pytest.approx(0)
        assert (part["most req/s"], part["most tokens/s"]) == (100, 356)
    with subtests.test("what a router adds is told of one request at a time"):
        names = ("TTFT p50", "TTFT p99", "E2E p50")
        rows = [
            {"front": front, "streams": streams, "prompt": 100, "answer": 1} | dict.fromkeys(names, ms)
            for front, streams, ms in (
                ("grpc", 1, 5.0),
                ("grpc", 32, 50.0),
                ("http", 1, 7.0),
                ("decode", 1, 2.0),
            )
        ]
        assert [(row["front"], row["added TTFT p50"]) for row in saturated.added(rows)] == [
            ("grpc", 3),
            ("http", 5),
        ]
    with subtests.test("several routers share the streams and the conversations"):
        asked = Asked("grpc", "a:1,b:2", streams=5, prompt_tokens=100, max_tokens=1, seconds=1)
        here, there = asked.by_address()
        assert [(each.address, each.streams) for each in (here, there)] == [("a:1", 3), ("b:2", 2)]
        prompts = [dict(Prompts(each).next() for _ in range(200)) for each in (here, there)]
        assert prompts[0].keys() == prompts[1].keys()
        for number, prompt in prompts[0].items():
            other = prompts[1][number]
            assert prompt[:90] == other[:90] and prompt[90:] != other[90:]
    with subtests.test("before it is measured each conversation is asked once"):
        asked = Asked("grpc", "host:1", 2, 100, 4, seconds=0.0, conversations=5, warms=True)
        prompts, numbers = Prompts(asked), []
        while prompts.goes_on(until_s=0.0):
            numbers.append(prompts.next()[0])
        assert numbers == [0, 1, 2, 3, 4]
