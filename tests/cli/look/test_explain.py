"""These tests show what `isthmus explain` and `isthmus index` print."""

from services.cli.look.explain import format_explanation
from services.cli.look.index import format_answer
from services.wire.isthmus.v1 import common_pb2, generation_pb2

HOME = common_pb2.RankId(worker="d0", rank=1, generation=7)
OTHER = common_pb2.RankId(worker="d0", rank=0, generation=7)
PREFILL = common_pb2.RankId(worker="p0", rank=0, generation=7)


def terms(**seconds):
    return [generation_pb2.CostTerm(name=name, seconds=value) for name, value in seconds.items()]


EXPLANATION = generation_pb2.ExplainResponse(
    prompt_tokens=900,
    reason="pinned",
    pinned=HOME,
    candidates=[
        generation_pb2.Candidate(
            decode=HOME,
            plan=common_pb2.PLAN_LOCAL,
            decode_hit_tokens=640,
            decode_indexed_tokens=704,
            terms=terms(wait_decode=0.01, compute=0.02, itl=0.0),
            total_s=0.03,
            pinned=True,
            chosen=True,
        ),
        generation_pb2.Candidate(
            decode=OTHER,
            prefill=PREFILL,
            plan=common_pb2.PLAN_REMOTE,
            terms=terms(wait_prefill=0.5, compute=0.2),
            total_s=0.7,
        ),
        generation_pb2.Candidate(prefill=common_pb2.RankId(worker="p1", rank=0), excluded="draining"),
    ],
)


def test_explanations(subtests):
    with subtests.test("an explanation names the choice the reason and every term"):
        lines = format_explanation(EXPLANATION).splitlines()
        assert lines[0] == "900 prompt tokens"
        assert lines[1] == "chosen: d0/1, plan local"
        assert lines[2].startswith("reason: pinned: the conversation is pinned there")
        assert lines[3] == "pinned to d0/1"
        held = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("d0", "p0", "p1"))}
        assert held["d0/1"] == ["decode", "704", "640"]
        assert held["p0/0"] == ["prefill", "0", "0"]
        prices = [line.split() for line in lines[lines.index("") + 1 :]]
        assert ["*", "d0/1", "-", "local", "10.00", "20.00", "30.00", "pinned"] in prices
        assert ["d0/0", "p0/0", "remote", "500.00", "200.00", "700.00"] in prices
        assert ["-", "p1/0", "draining"] in prices
        assert lines[-1] == "nothing anywhere: itl"
    with subtests.test("on a narrow terminal terms follow their candidate"):
        lines = format_explanation(EXPLANATION, width=40).splitlines()
        assert max(map(len, lines)) <= 40
        at = lines.index("*  d0/1    -        local   30.00")
        assert lines[at + 1 : at + 4] == [
            "     wait_decode 10.00  compute 20.00",
            "     note pinned",
            "   d0/0    p0/0     remote  700.00",
        ]
    with subtests.test("it says from whom the computing rank would pull"):
        answer = generation_pb2.ExplainResponse()
        answer.CopyFrom(EXPLANATION)
        for candidate in answer.candidates[:2]:
            candidate.source.CopyFrom(OTHER)
            candidate.source_tokens = 704
        answer.candidates[0].terms.extend(terms(pull=0.004, lend=0.001))
        lines = format_explanation(answer).splitlines()
        assert lines[1] == "chosen: d0/1, plan local, pulled from d0/0"
        (headings,) = (line.split() for line in lines if "wait_decode" in line)
        assert headings[4:8] == ["wait_decode", "pull", "compute", "lend"]
        assert [line.split("  ")[-1].strip() for line in lines if "pulls 704 from d0/0" in line] == [
            "pinned, pulls 704 from d0/0",
            "pulls 704 from d0/0",
        ]
    with subtests.test("it says what the answer is kept to and which past answers are known"):
        answer = generation_pb2.ExplainResponse(constraint="grammar", past_answers={"unknown": 1, "found": 3})
        lines = format_explanation(answer).splitlines()
        assert "the answer is kept to a constraint: grammar" in lines
        assert "past answers: 3 found, 1 unknown" in lines
    with subtests.test("where a model carries a state both kinds are shown"):
        told = {"decode_resume_tokens": 128, "decode_indexed_resume_tokens": 192}
        candidates = [
            generation_pb2.Candidate(decode=HOME, decode_hit_tokens=640, decode_indexed_tokens=704, **told),
            generation_pb2.Candidate(decode=OTHER, decode_hit_tokens=320, decode_indexed_tokens=320),
        ]
        answer = generation_pb2.ExplainResponse(
            prompt_tokens=900, candidates=candidates, carried_bytes=62 << 20
        )
        lines = format_explanation(answer).splitlines()
        assert lines[0] == "900 prompt tokens; tails and states are 62.0 MiB"
        headings = next(line for line in lines if line.startswith("rank"))
        assert headings.split("  in the index  ")[1].split("  ") == ["counted as", "resumable", "resumed at"]
        rows = [line.split() for line in lines]
        assert ["d0/1", "decode", "704", "640", "192", "128"] in rows
        assert ["d0/0", "decode", "320", "320", "all", "all"] in rows
    with subtests.test("pools are shown where they differ"):

        def of(decode_tokens, prefill_tokens):
            other = {"decode": OTHER, "decode_context_tokens": 64, "excluded": "too small"}
            home = {"decode": HOME, "decode_context_tokens": decode_tokens, "prefill": PREFILL}
            candidates = [dict(other), {**home, "prefill_context_tokens": prefill_tokens}]
            return generation_pb2.ExplainResponse(
                candidates=[generation_pb2.Candidate(plan=common_pb2.PLAN_REMOTE, **c) for c in candidates]
            )

        rows = [line.split() for line in format_explanation(of(128, 99)).splitlines()]
        assert ["d0/0", "decode", "0", "0", "64"] in rows and ["d0/1", "decode", "0", "0", "128"] in rows
        assert ["p0/0", "prefill", "0", "0", "99"] in rows
        rows = [line.split() for line in format_explanation(of(64, 99)).splitlines()]
        assert ["d0/0", "decode", "0", "0"] in rows and ["p0/0", "prefill", "0", "0"] in rows
    with subtests.test("where nothing can be chosen every rank says why"):
        reason = "no decode rank can take the request: 1 draining, 1 not connected"
        answer = generation_pb2.ExplainResponse(
            prompt_tokens=900,
            reason=reason,
            candidates=[
                generation_pb2.Candidate(
                    decode=HOME, decode_hit_tokens=640, pinned=True, excluded="draining"
                ),
                generation_pb2.Candidate(decode=OTHER, excluded="not connected"),
                generation_pb2.Candidate(prefill=PREFILL),
            ],
        )
        lines = format_explanation(answer).splitlines()
        assert lines[1] == f"no choice: {reason}"
        rows = [line.split() for line in lines]
        assert ["d0/1", "decode", "0", "640"] in rows
        assert ["d0/1", "-", "draining"] in rows
        assert ["d0/0", "-", "not", "connected"] in rows
        assert ["-", "p0/0"] in rows
    with subtests.test("a router that goes by load alone says so"):
        answer = generation_pb2.ExplainResponse(prompt_tokens=1, degraded="etcd_away: no route")
        assert "degraded, from memory: etcd_away: no route" in format_explanation(answer)


def test_the_index(subtests):
    with subtests.test("the index shows where ranks can go on"):
        tells = generation_pb2.RankStatus(
            rank=HOME,
            role=common_pb2.ROLE_DECODE,
            index_blocks=12,
            resumable_blocks=3,
            trust=1.0,
            resume_trust=0.5,
        )
        plain = generation_pb2.RankStatus(rank=OTHER, role=common_pb2.ROLE_DECODE, index_blocks=7, trust=1.0)
        _, headings, _, *rows = format_answer(
            generation_pb2.ListRanksResponse(ranks=[tells, plain])
        ).splitlines()
        assert headings.split()[4:6] == ["blocks", "resumable"] and "trust  resume trust  running" in headings
        assert rows[0].split()[3:5] == ["12", "3"] and "1.00   0.50" in rows[0]
        assert rows[1].split()[3:5] == ["7", "all"]
        alone = format_answer(generation_pb2.ListRanksResponse(ranks=[plain]))
        assert "resum" not in alone
    with subtests.test("the index shows trust and load"):
        load = common_pb2.RankLoad(running=3, waiting=2, used_pages=5, cached_pages=90, total_pages=100)
        rank = generation_pb2.RankStatus(
            rank=HOME,
            role=common_pb2.ROLE_DECODE,
            state="live",
            index_blocks=12,
            epoch=2,
            next_sequence=34,
            record_age_s=0.056,
            staleness_s=0.3,
            current=True,
            trust=0.5,
            load=load,
            pending_tokens=678,
            prefill_tokens_per_s=9_000,
            excluded="draining",
        )
        gap = generation_pb2.RankStatus(
            rank=OTHER, role=common_pb2.ROLE_DECODE, state="suspect", unregistered_s=61.7, staleness_s=90.25
        )
        answer = generation_pb2.ListRanksResponse(ranks=[rank, gap], staleness_s=0.25)
        said, headings, _, first, second = format_answer(answer).splitlines()
        assert said == "the index is 0.250 s behind the ranks"
        assert headings.split()[:4] == ["rank", "role", "state", "generation"]
        cells = first.split()
        assert cells[:3] == ["d0/1", "decode", "live"]
        assert cells[4:] == [
            "12",
            "2",
            "34",
            "0.056",
            "s",
            "0.300",
            "s",
            "0.50",
            "3",
            "2",
            "678",
            "9000",
            "5+90/100",
            "draining",
        ]
        assert "incomplete  90.250 s" in second and second.endswith("no key in etcd for 62 s")
    with subtests.test("an empty cluster"):
        assert "no rank is registered" in format_answer(generation_pb2.ListRanksResponse())
