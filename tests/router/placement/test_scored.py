"""Of a request that asks of its prompt's tokens: what is behind the first of them is computed anywhere."""

from itertools import product

import pytest

from router.placement.known_cluster import BLOCK, HYBRID, LAYOUT, REMOTE, Router, admitted, chains
from services.values.rank import Plan

LOCAL = frozenset({Plan.LOCAL})


def test_who_computes_reuses_no_more_than_it_may(subtests):
    with subtests.test("who computes reuses no more and who receives holds all"):
        router = Router(1, 1)
        router.holds(router.decodes[0], 40)
        router.holds(router.prefills[0], 40)
        asked = {"reusable_tokens": 10 * BLOCK + 3}
        local = router.place(plans=LOCAL, **asked).chosen
        assert (local.decode.hit_tokens, local.decode.reused_tokens) == (40 * BLOCK, 10 * BLOCK + 3)
        remote = router.place(plans=REMOTE, **asked).chosen
        assert (remote.decode.hit_tokens, remote.prefill.reused_tokens) == (40 * BLOCK, 10 * BLOCK + 3)
        for priced in (local, remote):
            compute_s = dict(priced.terms)["compute"]
            assert compute_s == pytest.approx((40 * BLOCK + 7 - 10 * BLOCK - 3) / 10_000)
    with subtests.test("who holds most is not preferred for what it must compute again"):
        # By plan local it is worth no more than another that is less busy.
        router = Router(2, 0)
        router.holds(router.decodes[0], 40)
        router.waits(router.decodes[0], 1_000)
        assert router.place().chosen.decode.id == router.decodes[0].id
        assert router.place(reusable_tokens=0).chosen.decode.id == router.decodes[1].id
    with subtests.test("of those that report checkpoints the deepest before it counts"):
        router = Router(1, 0, layout=HYBRID)
        router.holds(router.decodes[0], 40, 7, 20, 40)
        chosen = router.place(plans=LOCAL, reusable_tokens=19 * BLOCK + 63).chosen.decode
        assert (chosen.resume_tokens, chosen.matched_resume_tokens) == (7 * BLOCK, 7 * BLOCK)
        assert router.place(plans=LOCAL, reusable_tokens=20 * BLOCK).chosen.decode.resume_tokens == 20 * BLOCK


def test_a_rank_that_had_what_it_may_reuse_has_kept_its_word(subtests):
    for resumable, reused in product([(), (20, 40)], [20, 0]):
        with subtests.test(resumable=resumable, reused=reused):
            router = Router(1, 0, layout=HYBRID if resumable else LAYOUT)
            rank = router.decodes[0]
            router.holds(rank, 40, *resumable)
            asked = router.asked(plans=LOCAL, reusable_tokens=20 * BLOCK)
            decision = router.placer.place(asked, 0.5)
            router.placer.sent("a", chains(), asked.prompt_tokens, decision, asked.reusable_tokens)
            router.placer.outcomes.admitted("a", chains(), decision.chosen, admitted(reused * BLOCK))
            balance, key = router.balance, rank.id.key
            trusts = balance.trust.of(key, router.now), balance.resume_trust.of(key, router.now)
            assert (min(trusts) == 1.0) is (reused == 20)
