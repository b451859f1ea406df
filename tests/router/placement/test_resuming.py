"""Ranks of a layout that carries a state: what they hold saves bytes, where they kept one saves computing.

The layout is Qwen3.5-35B-A3B's: 20 KiB a token, and a state as heavy as 3,174 of them.
"""

from dataclasses import replace

import pytest

from router.placement.known_cluster import (
    BLOCK,
    HASHES,
    HYBRID,
    LAYOUT,
    REMOTE,
    STATE_BYTES,
    Router,
    admitted,
    chains,
)
from services.values.rank import Plan
from services.values.rank_reports import NO_CHECKPOINTS

LOCAL = frozenset({Plan.LOCAL})
PROMPT = 40 * BLOCK + 7
TOKEN_BYTES = 20 << 10


def hybrid(decodes: int, prefills: int) -> Router:
    return Router(decodes, prefills, layout=HYBRID)


def send(router: Router, request_id: str, num_blocks: int = 40, **changes):
    decision = router.place(num_blocks, **changes)
    router.placer.sent(request_id, chains(num_blocks), num_blocks * BLOCK + 7, decision)
    return decision.chosen


def test_the_state_crosses_whatever_decode_holds(subtests):
    with subtests.test("a short delta is mostly state"):
        router = hybrid(1, 1)
        router.holds(router.decodes[0], 38)
        router.holds(router.prefills[0], 40, 40)
        terms = dict(router.place(plans=REMOTE).chosen.terms)
        bytes_per_s = router.balance.bandwidth(router.prefills[0].id.key, router.decodes[0].id.key)
        assert terms["carried"] == STATE_BYTES / bytes_per_s
        assert terms["last_chunk"] == pytest.approx((2 * BLOCK + 7) * TOKEN_BYTES / bytes_per_s)
        assert terms["carried"] > 20 * terms["last_chunk"]
        assert "carried" not in dict(Router(1, 1).place(plans=REMOTE).chosen.terms)
    with subtests.test("the state crosses after a full hit too and can make local cheaper"):
        # 3,000 tokens a second and 1 GB a second: to move the state takes as long as to compute 195 tokens.
        router = hybrid(1, 1)
        decode, prefill = router.decodes[0], router.prefills[0]
        router.holds(prefill, 40, 40)
        for num_resumed, plan in ((39, Plan.LOCAL), (30, Plan.REMOTE)):
            router.holds(decode, 40, num_resumed)
            router.waits(decode, 0, prefill_tokens_per_s=3_000.0)
            assert router.place().chosen.plan is plan, num_resumed


def test_who_holds_and_cannot_go_on_is_not_taken_for_cheap_to_compute():
    router = hybrid(2, 2)
    router.holds(router.decodes[0], 40)
    router.holds(router.decodes[1], 30, 10, 20)
    chosen = router.place(plans=LOCAL).chosen
    assert chosen.decode.id.rank == 1
    assert dict(chosen.terms)["compute"] == (PROMPT - 20 * BLOCK) / 10_000
    router.holds(router.prefills[0], 40)
    router.holds(router.prefills[1], 30, 10, 20)
    chosen = router.place(plans=REMOTE).chosen
    assert (chosen.decode.id.rank, chosen.prefill.id.rank) == (0, 1)  # what decode holds need not cross
    assert dict(chosen.terms)["compute"] == (PROMPT - 20 * BLOCK) / 10_000
    assert (chosen.prefill.hit_tokens, chosen.prefill.resume_tokens) == (30 * BLOCK, 20 * BLOCK)


def test_nobody_goes_on_behind_the_last_token():
    """It is always computed: of a prompt that ends with a block the state at its end is of no use."""
    router = hybrid(1, 0)
    router.holds(router.decodes[0], 40, 7, 40)
    chosen = router.place(plans=LOCAL, prompt_tokens=40 * BLOCK).chosen
    assert (chosen.decode.hit_tokens, chosen.decode.resume_tokens) == (40 * BLOCK, 7 * BLOCK)


def test_who_tells_no_points_goes_on_wherever_it_holds(subtests):
    for changes in [{"layout": LAYOUT}, {"capabilities": (NO_CHECKPOINTS,)}]:
        with subtests.test(changes=changes):
            router = hybrid(1, 0)
            router.placer.set_ranks([replace(router.decodes[0], **changes)], [])
            router.holds(router.decodes[0], 40)
            chosen = router.place(plans=LOCAL).chosen
            assert (chosen.decode.resume_tokens, chosen.decode.reused_tokens) == (None, 40 * BLOCK)
            assert dict(chosen.terms)["compute"] == 7 / 10_000


def test_where_one_goes_on_is_a_promise_of_its_own(subtests):
    with subtests.test("each role is held to its own promise"):
        router = hybrid(1, 1)
        decode, prefill = router.decodes[0].id.key, router.prefills[0].id.key
        for number in range(30):
            router.holds(router.decodes[0], 40, 40)
            router.holds(router.prefills[0], 40, 40)
            chosen = send(router, str(number), plans=REMOTE)
            found = admitted(40 * BLOCK, 0, Plan.REMOTE)  # the state was gone
            router.placer.outcomes.admitted(str(number), chains(), chosen, found)
            router.placer.outcomes.ended(str(number))
            router.now += 7  # what was predicted has ended
        balance = router.balance
        assert balance.resume_trust.of(prefill, router.now) < 0.4
        assert balance.trust.of(prefill, router.now) == 1.0  # of what it holds it said nothing
        assert balance.trust.of(decode, router.now) == balance.resume_trust.of(decode, router.now) == 1.0
        router.holds(router.prefills[0], 40, 40)
        again = router.place(plans=REMOTE).chosen.prefill
        assert again.matched_resume_tokens == 40 * BLOCK
        assert again.resume_tokens < 0.4 * again.matched_resume_tokens
        assert again.hit_tokens == 40 * BLOCK
    with subtests.test("under plan local decode is held to where it was to go on"):
        router = hybrid(1, 0)
        rank = router.decodes[0]
        router.holds(rank, 40, 5, 40)
        chosen = send(router, "a", plans=LOCAL)
        router.placer.outcomes.admitted("a", chains(), chosen, admitted(5 * BLOCK))
        assert router.balance.resume_trust.of(rank.id.key, router.now) < 1.0
        assert router.balance.trust.of(rank.id.key, router.now) == 1.0
    with subtests.test("the index is corrected in the kind that was wrong"):
        router = hybrid(1, 1)
        decode, prefill = router.decodes[0], router.prefills[0]
        for rank in (decode, prefill):
            router.holds(rank, 40, 5, 20, 40)
        chosen = send(router, "a", plans=REMOTE)
        found = admitted(30 * BLOCK, 5 * BLOCK, Plan.REMOTE)
        router.placer.outcomes.admitted("a", chains(), chosen, found)
        points = router.index.checkpoints
        assert router.index.match(prefill.id.key, HASHES) == 40
        assert points.deepest(HASHES, {prefill.id.key: 40}) == {prefill.id.key: 5}
        assert router.index.match(decode.id.key, HASHES) == 30  # and no point beyond
        assert points.deepest(HASHES, {decode.id.key: 40}) == {decode.id.key: 20}


def test_where_one_can_soon_go_on(subtests):
    with subtests.test("a prompt that ends with a block can soon be gone on from at the block before"):
        router = hybrid(1, 0)
        decision = router.place(plans=LOCAL, prompt_tokens=40 * BLOCK)
        router.placer.sent("a", chains(), 40 * BLOCK, decision)
        for prompt_tokens in (40 * BLOCK, PROMPT):
            soon = router.place(plans=LOCAL, prompt_tokens=prompt_tokens).chosen.decode
            assert (soon.hit_tokens, soon.resume_tokens) == (40 * BLOCK, 39 * BLOCK)
    with subtests.test("what is computed somewhere can soon be gone on from there"):
        router = hybrid(1, 1)
        first = send(router, "a", plans=REMOTE)
        soon = router.place(plans=REMOTE).chosen.prefill
        assert (soon.hit_tokens, soon.resume_tokens, soon.matched_resume_tokens) == (
            40 * BLOCK,
            40 * BLOCK,
            0,
        )
        shorter = router.place(num_blocks=39, plans=REMOTE).chosen.prefill  # it ends where no state will be
        assert (shorter.hit_tokens, shorter.resume_tokens) == (39 * BLOCK, 0)
        router.placer.outcomes.admitted("a", chains(), first, admitted(0, 0, Plan.REMOTE))
        received = router.place(plans=LOCAL).chosen.decode  # the state that came is of no block's end
        assert (received.hit_tokens, received.resume_tokens) == (40 * BLOCK, 0)
        router.now += 60
        assert router.place(plans=REMOTE).chosen.prefill.reused_tokens == 0


def test_decode_can_soon_go_on_at_the_last_block_that_the_answer_passed(subtests):
    for plan, num_tokens, soon in [(Plan.REMOTE, 20, 0), (Plan.REMOTE, 64, 39), (Plan.LOCAL, 20, 38)]:
        with subtests.test(plan=plan, num_tokens=num_tokens, soon=soon):
            router = hybrid(1, 1)
            decode = router.decodes[0].id.key
            chosen = send(router, "a", 38, plans=frozenset({plan}))
            prompt = chains(38)
            found = replace(admitted(0, 0, plan), prompt_tokens=38 * BLOCK + 7)
            router.placer.outcomes.admitted("a", prompt, chosen, found)
            router.placer.outcomes.finished(prompt, chosen, range(38 * BLOCK + 7 + num_tokens), 0)
            predictions = router.balance.predictions
            guessed = predictions.of(prompt, router.now).resumable()
            found = [depth for depth, ranks in guessed if decode in ranks]
            assert found == ([38] if plan is Plan.LOCAL else [])
            assert sum(decode in ranks for ranks in predictions._resumable.values()) == (soon > 0)
