"""Ranks whose blocks are named by pairs of tokens, beside ranks whose blocks are named by tokens."""

from dataclasses import replace
from itertools import product

from router.placement.known_cluster import BLOCK, REMOTE, Router, admitted
from router.ranks.observed import predicted
from services.kv.block_hash import BlockChains, pair_hashes, scope_seed, sequence_hashes
from services.values.rank import Plan, Role
from services.values.registration import PAIR_BLOCKS

SEED = scope_seed("m")
IDS = list(range(1_000, 1_000 + 10 * BLOCK + 7))
CHAINS = BlockChains(sequence_hashes(IDS, BLOCK, SEED), pair_hashes(IDS, BLOCK, SEED))
LOCAL = frozenset({Plan.LOCAL})


def mixed(decodes: int, prefills: int, paired=(Role.DECODE,)) -> Router:
    """As with EAGLE on one role alone."""
    router = Router(decodes, prefills)
    router.decodes, router.prefills = (
        [replace(rank, capabilities=(PAIR_BLOCKS,) * (rank.role in paired)) for rank in side]
        for side in (router.decodes, router.prefills)
    )
    router.placer.set_ranks(router.decodes, router.prefills)
    return router


def holds(router, rank, blocks):
    router.index.apply_snapshot(rank.id, CHAINS.of(rank.has_pair_blocks)[:blocks])


def place(router, plans=REMOTE, chains=CHAINS, **changes):
    return router.place(chains=chains, prompt_tokens=len(IDS), plans=plans, **changes)


def test_each_rank_is_matched_by_its_own_chain(subtests):
    for paired, (decodes, prefills) in product(
        [(), (Role.DECODE,), (Role.PREFILL,), tuple(Role)], [(2, 2), (40, 40)]
    ):
        with subtests.test(paired=paired, decodes=decodes, prefills=prefills):
            router = mixed(decodes, prefills, paired)
            decode, prefill = router.decodes[-1], router.prefills[-2]
            holds(router, decode, 8)
            holds(router, prefill, 6)
            chosen = place(router).chosen
            assert (chosen.decode.id, chosen.prefill.id) == (decode.id, prefill.id)
            assert (chosen.decode.matched_tokens, chosen.prefill.matched_tokens) == (8 * BLOCK, 6 * BLOCK)
            asked = router.asked(chains=CHAINS, prompt_tokens=len(IDS), plans=REMOTE)
            assert (
                max(way.decode.matched_tokens for way in router.placer.explain(asked, 0.5).ranked)
                == 8 * BLOCK
            )


def test_a_rank_is_matched_by_no_other_chain(subtests):
    with subtests.test("a name of the other chain is no hit"):
        router = mixed(1, 0)
        router.index.apply_snapshot(router.decodes[0].id, CHAINS.tokens)
        assert place(router, LOCAL).chosen.decode.matched_tokens == 0
    with subtests.test("pairs are wanted only where some rank has them"):
        router = mixed(2, 2)
        assert router.placer.wants_pairs
        router.placer.set_ranks([replace(rank, capabilities=()) for rank in router.decodes], router.prefills)
        assert not router.placer.wants_pairs


def test_ranks_of_both_kinds_in_one_role_are_compared_in_tokens():
    router = mixed(40, 0)
    router.decodes[0] = replace(router.decodes[0], capabilities=())
    router.placer.set_ranks(router.decodes, [])
    holds(router, router.decodes[0], 5)
    holds(router, router.decodes[1], 6)
    assert place(router, LOCAL).chosen.decode.id == router.decodes[1].id
    holds(router, router.decodes[0], 7)
    assert place(router, LOCAL).chosen.decode.id == router.decodes[0].id


def test_what_was_sent_and_answered_is_predicted_by_the_ranks_chain(subtests):
    for decodes in [1, 40]:
        with subtests.test(decodes=decodes):
            router = mixed(decodes, decodes)
            decision = place(router)
            decode, prefill = decision.chosen.decode.id.key, decision.chosen.prefill.id.key
            router.placer.sent("a", CHAINS, len(IDS), decision)
            assert predicted(router.balance, prefill, CHAINS.tokens) == 10
            outcomes = router.placer.outcomes
            found = replace(admitted(0, 0, Plan.REMOTE), prompt_tokens=len(IDS))
            outcomes.admitted("a", CHAINS, decision.chosen, found)
            assert predicted(router.balance, decode, CHAINS.pairs) == 10
            assert predicted(router.balance, decode, CHAINS.tokens) == 0
            all_ids = [*IDS, *range(2 * BLOCK)]
            outcomes.finished(CHAINS, decision.chosen, all_ids, SEED)
            outcomes.ended("a")
            longer = pair_hashes(all_ids, BLOCK, SEED)
            assert predicted(router.balance, decode, longer) == len(longer) == 12
            chains = BlockChains(sequence_hashes(all_ids, BLOCK, SEED), longer)
            again = router.place(chains=chains, prompt_tokens=len(all_ids), plans=REMOTE).chosen
            assert (again.decode.id.key, again.decode.hit_tokens) == (decode, 12 * BLOCK)


def test_the_last_pair_of_an_answer_needs_the_token_behind_it(subtests):
    """The newest token's KV was never computed, so it is in no key."""
    for tokens, blocks in [(2 * BLOCK + 1, 1), (2 * BLOCK + 2, 2)]:
        with subtests.test(tokens=tokens, blocks=blocks):
            router = mixed(1, 1)
            chosen = place(router).chosen
            ids = IDS[:tokens]
            router.placer.outcomes.finished(BlockChains((), ()), chosen, ids, SEED)
            assert predicted(router.balance, chosen.decode.id.key, CHAINS.pairs) == blocks


def test_a_promise_of_pairs_that_was_not_kept_is_taken_back():
    router = mixed(1, 1)
    rank = router.decodes[0]
    holds(router, rank, 10)
    decision = place(router)
    router.placer.sent("a", CHAINS, len(IDS), decision)
    found = replace(admitted(3 * BLOCK, 0, Plan.REMOTE), prompt_tokens=len(IDS))
    router.placer.outcomes.admitted("a", CHAINS, decision.chosen, found)
    assert router.index.match(rank.id.key, CHAINS.pairs) == 3
    assert router.balance.trust.of(rank.id.key, router.now) < 1
