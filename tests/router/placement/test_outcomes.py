"""These tests show what became of a placement, and what the next one makes of it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.placement.known_cluster import BLOCK, HASHES, HYBRID, REMOTE, Router, admitted, chains
from router.ranks.observed import predicted
from services.index.read.prefix_index import deepest
from services.router.ranks.rank_order import Share
from services.values.rank import Generation, Plan
from services.values.rank_reports import LENDS, NO_CACHE, PULLS, Coming
from services.values.request import Pulled


def test_a_promise_that_was_not_kept_lowers_what_the_next_one_is_worth():
    router = Router(2, 0)
    liar = router.decodes[0]
    for number in range(30):
        router.holds(liar, 40)
        decision = router.placer.place(router.asked(tried=router.all_but(liar)), 0.5)
        router.placer.sent(str(number), chains(), 2_567, decision)
        router.placer.outcomes.admitted(str(number), chains(), decision.chosen, admitted(0))
        router.placer.outcomes.ended(str(number))
        router.now += 7  # what was predicted has ended
    router.holds(liar, 40)
    asked = router.asked(tried=router.all_but(liar))
    chosen = router.placer.place(asked, 0.5).chosen.decode
    assert chosen.matched_tokens == 40 * BLOCK
    assert chosen.hit_tokens < 0.4 * chosen.matched_tokens
    router.now += 600
    assert router.place().chosen.decode.hit_tokens == 40 * BLOCK  # given another chance


def run_one(router: Router, decode_prefix_len: int):
    decision = router.place(num_blocks=20)
    router.placer.sent("a", chains(20), 20 * BLOCK + 7, decision)
    yield
    router.placer.outcomes.admitted("a", chains(20), decision.chosen, admitted(decode_prefix_len))
    yield


def test_the_index_is_corrected_where_it_has_heard_nothing_since(subtests):
    with subtests.test("an index that has heard nothing since is corrected at once"):
        router = Router(1, 0)
        rank = router.decodes[0]
        router.holds(rank, 40)
        request = run_one(router, 5 * BLOCK)
        next(request)
        next(request)
        assert router.index.match(rank.id.key, HASHES[:20]) == 5
        assert not router.index.match(rank.id.key, HASHES[19:20])
        assert predicted(router.balance, rank.id.key, HASHES) == 20  # for it was computed since
    with subtests.test("an index that was told meanwhile is left alone"):
        router = Router(1, 0)
        rank = router.decodes[0]
        router.holds(rank, 40)
        request = run_one(router, 5 * BLOCK)
        next(request)
        router.holds(rank, 20)  # evicted, and computed again for this request
        router.records[rank.id.key] += 1
        next(request)
        assert router.index.match(rank.id.key, HASHES) == 20


def test_what_was_sent_counts_where_it_will_be_computed_before_the_index_knows():
    router = Router(1, 2)
    remote = frozenset({Plan.REMOTE})
    first = router.place(plans=remote)
    router.placer.sent("a", chains(), 2_567, first)
    prefill = first.chosen.prefill
    assert predicted(router.balance, prefill.id.key, HASHES) == 40
    assert router.index.match(prefill.id.key, HASHES) == 0  # never mixed
    assert predicted(router.balance, first.chosen.decode.id.key, HASHES) == 0  # nothing has landed
    router.placer.outcomes.admitted("a", chains(), first.chosen, admitted(0, 0, Plan.REMOTE))
    assert predicted(router.balance, first.chosen.decode.id.key, HASHES) == 40
    router.now += 60
    assert predicted(router.balance, prefill.id.key, HASHES) == 0


def test_nothing_is_predicted_of_a_rank_without_a_cache(subtests):
    """Its siblings keep one, as in the middle of a roll-out."""
    for plans in [REMOTE, frozenset({Plan.LOCAL})]:
        with subtests.test(plans=plans):
            router, (plan,) = Router(2, 2), plans
            cacheless = [
                replace(side[0], capabilities=(NO_CACHE,)) for side in (router.decodes, router.prefills)
            ]
            router.placer.set_ranks([cacheless[0], router.decodes[1]], [cacheless[1], router.prefills[1]])
            for index in range(2):
                others = router.all_but(router.decodes[index], router.prefills[index])
                decision = router.place(plans=plans, tried=others)
                router.placer.sent("a", chains(), 2_567, decision)
                router.placer.outcomes.admitted("a", chains(), decision.chosen, admitted(0, 0, plan))
                router.placer.outcomes.finished(chains(), decision.chosen, range(42 * BLOCK), 0)
                router.placer.outcomes.ended("a")
                used = [
                    rank for rank in (decision.chosen.decode, decision.chosen.prefill) if rank is not None
                ]
                depths = {predicted(router.balance, rank.id.key, HASHES) for rank in used}
                assert depths == {40 if index else 0}
            assert router.place(plans=plans).chosen.decode.hit_tokens == 40 * BLOCK


def pulling(*, own_blocks: int = 5) -> tuple[Router, object]:
    """The prefill rank holds so many blocks of forty, its source all of them."""
    router = Router(1, 1, capabilities=(LENDS, PULLS))
    router.holds(router.decodes[0], 40)
    router.holds(router.prefills[0], own_blocks)
    decision = router.place(plans=REMOTE)
    assert decision.chosen.source.id == router.decodes[0].id
    router.placer.sent("a", chains(), 2_567, decision)
    return router, decision.chosen


def admit(router: Router, chosen, prefill_prefix_len: int, pulled: Pulled | None, holds: int = 40) -> None:
    told = admitted(holds * BLOCK, prefill_prefix_len, Plan.REMOTE, pulled)
    router.placer.outcomes.admitted("a", chains(), chosen, told)


def test_what_came_of_a_source(subtests):
    with subtests.test("what is to be pulled need not be computed there"):
        router, _ = pulling()
        assert router.balance.now(router.prefills[0].id.key).pending_tokens == 7
    with subtests.test("it had what the index said, and so had the rank that pulled"):
        router, chosen = pulling()
        pulled = Pulled(35 * BLOCK, 35 << 20, seconds=0.04, held_tokens=40 * BLOCK)
        admit(router, chosen, 40 * BLOCK, pulled)
        source, computing = router.decodes[0].id.key, router.prefills[0].id.key
        assert router.balance.trust.of(source, router.now) == 1.0
        assert router.index.match(computing, HASHES) == 5
        assert router.balance.pull_pace(source, computing).bytes_per_s == (35 << 20) / 0.035
    with subtests.test("what was pulled is no hit of the rank that pulled"):
        router, chosen = pulling()
        admit(router, chosen, 40 * BLOCK, Pulled(38 * BLOCK, 38 << 20, 0.04, held_tokens=40 * BLOCK))
        assert router.index.match(router.prefills[0].id.key, HASHES) == 2
    with subtests.test("the source held less: the index learns it, and trusts it less"):
        router, chosen = pulling()
        admit(router, chosen, 5 * BLOCK, Pulled(refused="evicted", held_tokens=3 * BLOCK), holds=3)
        source = router.decodes[0].id.key
        assert router.index.match(source, HASHES) == 3
        assert router.balance.trust.of(source, router.now) < 0.8
        assert router.index.match(router.prefills[0].id.key, HASHES) == 5
        assert router.balance.may_lend(source)
    with subtests.test("it refused and did not say what it holds: nothing is known but that"):
        router, chosen = pulling()
        admit(router, chosen, 5 * BLOCK, Pulled(refused="gone"))
        source = router.decodes[0].id.key
        assert router.index.match(source, HASHES) == 40 and not router.balance.may_lend(source)
    with subtests.test("it was not needed"):
        router, chosen = pulling()
        admit(router, chosen, 40 * BLOCK, None)
        assert router.balance.may_lend(router.decodes[0].id.key)
        assert router.index.match(router.prefills[0].id.key, HASHES) == 5
    with subtests.test("the request ended before anything was heard"):
        router, chosen = pulling()
        router.placer.outcomes.ended("a")
        admit(router, chosen, 5 * BLOCK, Pulled(refused="gone"))
        assert router.balance.may_lend(router.decodes[0].id.key)


def test_of_states_a_source_is_trusted_by_its_checkpoints():
    router = Router(1, 1, layout=HYBRID, capabilities=(LENDS, PULLS))
    router.holds(router.decodes[0], 40, 40)
    router.waits(router.prefills[0], 0, prefill_tokens_per_s=2_000.0)
    decision = router.place(plans=REMOTE)
    assert decision.chosen.source.tokens == 40 * BLOCK
    router.placer.sent("a", chains(), 2_567, decision)
    admit(router, decision.chosen, 0, Pulled(refused="evicted", held_tokens=0))
    source = router.decodes[0].id.key
    assert (
        router.balance.resume_trust.of(source, router.now) < router.balance.trust.of(source, router.now) == 1
    )
    assert router.index.match(source, HASHES) == 40
    assert router.index.checkpoints.num_blocks(source) == 0


sent_prompts = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 40), st.floats(0, 20)), min_size=1, max_size=12
)


@given(sent_prompts, st.booleans(), st.booleans())
def test_routers_predict_what_the_others_have_sent(sent, is_remote, is_hybrid):
    """Both predict the same of every rank for long prompts: what a list of all that was sent says."""
    shape = (2, 2) if is_remote else (3, 0)
    layout = {"layout": HYBRID} if is_hybrid else {}
    routers = [Router(*shape, **layout) for _ in range(2)]
    for index, router in enumerate(routers):
        router.placer.set_share(Share(index, 2))
    told: list[Coming] = []
    live: list[tuple[Coming, float]] = []
    for number, (index, num_blocks, passed_s) in enumerate(sent):
        for router in routers:
            router.now += passed_s
        router, other = routers[index], routers[1 - index]
        asked = replace(router.asked(num_blocks), **({"plans": REMOTE} if is_remote else {}))
        decision = router.placer.place(asked, 0.5)
        computing = decision.chosen.prefill or decision.chosen.decode
        coming = router.placer.coming(asked, decision)
        router.placer.sent(str(number), asked.hashes, asked.prompt_tokens, decision)
        tokens = asked.prompt_tokens - decision.chosen.reused_tokens
        assert (coming is not None) == (tokens >= 0.25 * computing.prefill_tokens_per_s)
        if coming is None:
            continue
        assert coming.rank == computing.id
        told.append(coming)
        live.append((coming, router.now + coming.for_s))
        other.placer.expect(coming)
    now = routers[0].now
    for rank in (*routers[0].decodes, *routers[0].prefills):
        of_rank = [each for each, until in live if each.rank == rank.id and until > now]
        least = max((len(each.blocks) for each in of_rank), default=0)
        point = max((each.resumable for each in of_rank), default=0)
        for router in routers:
            guessed = router.balance.predictions.of(HASHES, now)
            assert guessed.depth(rank.id.key) >= least
            assert deepest(guessed.resumable(), {rank.id.key: 40}).get(rank.id.key, 0) >= point
        if all(index == 0 for index, _, _ in sent):  # The second router knows nothing else.
            assert predicted(routers[1].balance, rank.id.key, HASHES) == least


def test_nobody_is_told_of_what_no_other_router_can_use(subtests):
    router = Router(1, 0)
    asked = router.asked()
    decision = router.placer.place(asked, 0.5)
    with subtests.test("there is no other router"):
        assert router.placer.coming(asked, decision) is None
    router.placer.set_share(Share(0, 2))
    with subtests.test("it is told of all its blocks"):
        coming = router.placer.coming(asked, decision)
        assert coming.blocks == tuple(HASHES) and coming.rank == router.decodes[0].id
    with subtests.test("the rank was started anew meanwhile"):
        router.placer.expect(replace(coming, rank=replace(coming.rank, generation=Generation(2))))
        assert predicted(router.balance, coming.rank.key, HASHES) == 0
        router.placer.expect(coming)
        assert predicted(router.balance, coming.rank.key, HASHES) == 40
    with subtests.test("what is to be expected for ever ends"):
        router.placer.expect(replace(coming, for_s=1e300))
        router.now += 601
        assert predicted(router.balance, coming.rank.key, HASHES) == 0
    with subtests.test("the rank keeps nothing"):
        router.placer.set_ranks([replace(router.decodes[0], capabilities=(NO_CACHE,))], [])
        assert router.placer.coming(asked, decision) is None
