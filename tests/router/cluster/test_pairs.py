"""Ranks whose blocks are named by pairs of tokens, as a router with a mirror sees them."""

from array import array

from router.cluster.fake_mirror import D0_KEY, connect, view
from services.kv.block_hash import pair_hashes, scope_seed
from services.router.server import GenerationService
from services.values.rank import Role
from services.values.registration import PAIR_BLOCKS

IDS = array("I", range(100))  # six blocks, and four tokens


async def test_the_second_chain_is_hashed_where_a_rank_has_pairs_and_nowhere_else(two_decodes, mirror):
    assert (await two_decodes.hash(IDS, "t")).chains.pairs == ()
    mirror.set(view(Role.DECODE, 0, capabilities=(PAIR_BLOCKS,)), view(Role.PREFILL, 0))
    two_decodes.ranks(Role.DECODE)
    connect(two_decodes)
    prompt = await two_decodes.hash(IDS, "t")
    assert list(prompt.chains.pairs) == pair_hashes(IDS, 16, scope_seed("m", "t"))
    mirror.index.apply_snapshot(mirror.ranks[D0_KEY].registration.id, prompt.chains.pairs[:5])
    chosen = two_decodes.place(prompt, "", frozenset()).decision.chosen
    assert (chosen.decode.id.key, chosen.decode.matched_tokens) == (D0_KEY, 5 * 16)
    told = (await GenerationService(None, two_decodes, None).ListRanks(None, None)).ranks
    assert [(rank.index_blocks, rank.pair_blocks) for rank in told] == [(5, True), (0, False), (0, False)]
