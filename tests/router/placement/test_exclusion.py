"""May a rank be chosen: each reason by itself, which comes first, and what the other ranks add."""

from dataclasses import replace
from itertools import combinations, product

from router.placement.placement_ranks import LOCAL, REMOTE, decode, prefill, request
from services.router.placement.candidates import Asked
from services.router.placement.exclusion import (
    TOO_LONG,
    TOO_SMALL,
    Standing,
    beside_others,
    of_rank,
    shortest_wait_s,
)
from services.router.ranks.balance import Liveness
from services.values.adapter import Adapter
from services.values.kv import KvLayout
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.rank_reports import Registration

LAYOUT = KvLayout(page_size=16, page_bytes=1024, model_fingerprint=1)
D = Registration(
    Role.DECODE, RankAddress(RankId("d", 0, Generation(7)), "h:1"), LAYOUT, "m", 1_000, 1, "fake"
)
P = replace(D, role=Role.PREFILL)
WELL = Standing(Liveness.LIVE, is_connected=True)
ASKED = Asked((), 500, REMOTE | LOCAL)

ADAPTER = Adapter("a", "0" * 32)
# In the order in which they count: what makes each true of (rank, standing, asked).
REASONS = {
    "it failed this request": lambda r, s, a: (r, s, replace(a, tried=frozenset({D.id}))),
    "draining": lambda r, s, a: (replace(r, draining=True), s, a),
    f"it has not loaded {ADAPTER}": lambda r, s, a: (r, s, replace(a, adapter=ADAPTER)),
    "not connected": lambda r, s, a: (r, s._replace(is_connected=False), a),
    "the prompt is longer than its context": lambda r, s, a: (r, s, replace(a, prompt_tokens=1_001)),
    "stalled": lambda r, s, a: (r, s._replace(liveness=Liveness.STALLED), a),
    "its KV layout differs from that of most ranks in dtype": lambda r, s, a: (
        r,
        s._replace(differs_in="dtype"),
        replace(a, plans=REMOTE),
    ),
    TOO_SMALL: lambda r, s, a: (r, s, replace(a, must_hold=1_001)),
}
OF_DECODE_ALONE = {"not connected", TOO_SMALL}


def test_may_a_rank_be_chosen_at_all(subtests):
    with subtests.test("the first reason that is true is told"):
        for role, reasons in product(
            [Role.DECODE, Role.PREFILL], [(), *combinations(REASONS, 1), *combinations(REASONS, 2)]
        ):
            with subtests.test(role=role, reasons=reasons):
                rank, standing, asked = D if role is Role.DECODE else P, WELL, ASKED
                for reason in reasons:
                    rank, standing, asked = REASONS[reason](rank, standing, asked)
                true = [each for each in reasons if role is Role.DECODE or each not in OF_DECODE_ALONE]
                assert of_rank(rank, standing, asked) == (true[0] if true else "")
    with subtests.test("a rank that is not live says how"):
        for liveness in [each for each in Liveness if each]:
            with subtests.test(liveness=liveness):
                assert of_rank(P, WELL._replace(liveness=liveness), ASKED) == liveness.value


def test_the_context_of_a_rank_and_its_layout_by_role(subtests):
    with subtests.test("a decode rank needs room for one more token"):
        full = replace(ASKED, prompt_tokens=1_000)
        assert of_rank(D, WELL, full) == "the prompt is longer than its context"
        assert of_rank(P, WELL, full) == ""
        assert of_rank(D, WELL, replace(ASKED, prompt_tokens=999)) == ""
    with subtests.test("a decode rank of another layout may compute by itself"):
        other = WELL._replace(differs_in="page_size")
        assert of_rank(D, other, ASKED) == ""
        for rank, plans in ((D, REMOTE), (P, REMOTE | LOCAL)):
            assert "differs" in of_rank(rank, other, replace(ASKED, plans=plans))
    with subtests.test("another incarnation of a rank has failed nothing"):
        earlier = RankId("d", 0, Generation(6))
        assert of_rank(D, WELL, replace(ASKED, tried=frozenset({earlier}))) == ""


def reasons(asked, decodes, prefills):
    return tuple([rank.excluded for rank in side] for side in beside_others(asked, decodes, prefills))


def test_a_queue_is_too_long(subtests):
    with subtests.test("a queue is too long whichever rank one is paired with"):
        asked = request(plans=REMOTE, max_wait_s=3.0)
        decodes = [decode(0, queue_wait_s=1.0), decode(1, queue_wait_s=2.5)]
        prefills = [prefill(0, compute_wait_s=1.0), prefill(1, compute_wait_s=2.5)]
        assert shortest_wait_s(asked, decodes, prefills) == 2.0
        assert reasons(asked, decodes, prefills) == (["", TOO_LONG], ["", TOO_LONG])
        # Both could take it from the other side's idle rank, if that one were not gone.
        idle = decodes[0]._replace(queue_wait_s=0.0)
        assert reasons(asked, [idle, decodes[1]], prefills) == (["", TOO_LONG], ["", ""])
        gone = idle._replace(excluded="draining")
        assert reasons(asked, [gone, decodes[1]], prefills) == (["draining", TOO_LONG], [TOO_LONG, TOO_LONG])
    with subtests.test("under plan local both waits pass at once"):
        asked = request(plans=LOCAL, max_wait_s=3.0)
        ranks = [decode(0, queue_wait_s=3.0, compute_wait_s=2.0), decode(1, compute_wait_s=3.1)]
        assert shortest_wait_s(asked, ranks, []) == 3.0
        assert reasons(asked, ranks, []) == (["", TOO_LONG], [])
    with subtests.test("who cannot receive waits for no prefill rank"):
        asked = request(plans=REMOTE | LOCAL, max_wait_s=1.0)
        other = decode(0, receives=False, compute_wait_s=9.0)
        assert shortest_wait_s(asked, [other], [prefill(0)]) == 9.0
        assert reasons(asked, [other, decode(1)], [prefill(0)]) == ([TOO_LONG, ""], [""])
