"""Ranks of several KV layouts: which one counts, and what the others can do meanwhile."""

from collections import Counter
from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis.strategies import lists, sampled_from, sets, tuples

from router.placement.known_cluster import LAYOUT, REMOTE, Router, of_other_layout
from services.router.placement.decision import Nowhere
from services.router.placement.rank_snapshot import common_adapters, common_layout
from services.values.adapter import Adapter
from services.values.kv import DraftKv, GroupKind, KvGroup
from services.values.rank import Generation, Plan, RankAddress, RankId, Role
from services.values.rank_reports import Registration

RANK = Registration(
    Role.DECODE, RankAddress(RankId("w", 0, Generation(1)), "h:1"), LAYOUT, "m", 1_000, 1, "fake"
)


def test_a_decode_rank_of_another_layout_computes_alone(subtests):
    """A roll-out has reached the first ones; they are empty, and no prefill rank can write to them."""
    for decodes in [3, 60]:
        with subtests.test(decodes=decodes):
            router, new = Router(decodes, 4), decodes // 3
            router.placer.set_ranks(of_other_layout(router.decodes, new), router.prefills)
            for rank in router.decodes[new:]:
                router.waits(rank, 1_000)
            assert router.place(plans=REMOTE).chosen.decode.id.rank >= new
            remote = router.placer.explain(router.asked(plans=REMOTE), 0.5)
            assert {rank.id.rank for rank in remote.excluded} == set(range(new))
            either = router.place()
            assert (either.chosen.plan, either.excluded) == (Plan.LOCAL, ())
            assert either.chosen.decode.id.rank < new
            with_others = [way.decode.id.rank for way in either.ranked if way.plan is Plan.REMOTE]
            assert with_others and min(with_others) >= new


def test_the_layout_that_counts_is_that_of_the_most_pairs(subtests):
    for new_decodes, new_prefills, apart in [
        (1, 0, {"decode/0"}),
        (2, 0, {"decode/0", "decode/1"}),
        (2, 1, {"decode/2", "prefill/1", "prefill/2"}),  # as many pairs of each, and more decode ranks
        (3, 1, {"prefill/1", "prefill/2"}),
    ]:
        with subtests.test(new_decodes=new_decodes, new_prefills=new_prefills, apart=apart):
            router = Router(3, 3)
            router.placer.set_ranks(
                of_other_layout(router.decodes, new_decodes), of_other_layout(router.prefills, new_prefills)
            )
            excluded = router.placer.explain(router.asked(plans=REMOTE), 0.5).excluded
            assert {str(rank.id.key) for rank in excluded} == apart
            reasons = {rank.excluded for rank in excluded}
            assert reasons == {"its KV layout differs from that of most ranks in page_bytes"}


def test_layouts_that_differ_in_no_page_count_as_one(subtests):
    with subtests.test("layouts that differ in their tp degrees count as one"):
        router = Router(5, 2)
        old = [
            replace(rank, layout=replace(LAYOUT, tp_size=2**n)) for n, rank in enumerate(router.decodes[2:])
        ]
        router.placer.set_ranks(
            of_other_layout(router.decodes, 2)[:2] + old, of_other_layout(router.prefills, 1)
        )
        excluded = router.placer.explain(router.asked(plans=REMOTE), 0.5).excluded
        assert {str(rank.id.key) for rank in excluded} == {"decode/0", "decode/1", "prefill/0"}
    with subtests.test("layouts that differ in their draft models count as one"):
        router = Router(4, 2)
        group = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32", unit_bytes=64)
        drafting = replace(LAYOUT, draft=DraftKv(7, group))
        with_draft = [replace(rank, layout=drafting) for rank in router.decodes[2:]]
        router.placer.set_ranks(router.decodes[:2] + with_draft, router.prefills)
        assert not router.placer.explain(router.asked(plans=REMOTE), 0.5).excluded


A, B = LAYOUT, replace(LAYOUT, page_bytes=1 << 19)


def blue_and_green(router: Router, new: str, drained: str) -> tuple[list[Registration], list[Registration]]:
    """Both roles' ranks, those with layout B and those that drain by the first letter and number."""
    return tuple(
        [
            replace(rank, layout=B if name in new else A, draining=name in drained)
            for rank in side
            if (name := f"{rank.role.value[0]}{rank.id.rank}")
        ]
        for side in (router.decodes, router.prefills)
    )


def test_the_layout_that_counts_is_that_of_the_ranks_that_stay(subtests):
    for of_the_load, (new, drained, layout) in product(
        [False, True],
        [
            ("d2 p2", "", A),  # four pairs against one
            ("d2 p2", "d0 d1 p0 p1", B),  # the old ones drain: the new one takes over
            ("d2 p2", "d0 p0", A),  # a pair of each, and the first rank's counts
            ("d0 p0", "d1 p1", B),
            ("d2 p2", "p0 p1", B),  # nobody sends to the old ones any more
            ("d2 p2", "d0 d1", B),
            ("d2 p2", "d2 p2", A),
            ("d1 d2", "p0 p1 p2", B),  # no pairs: most decode ranks
            ("d1 d2", "d2 p0 p1 p2", A),
            ("d1 d2", "d0 d1 d2 p0", A),  # none is left: then all count, as if none drained
            ("d1 d2 p1 p2", "d0 d1 d2", B),
        ],
    ):
        with subtests.test(of_the_load=of_the_load, new=new, drained=drained, layout=layout):
            router = Router(3, 3)
            decodes, prefills = blue_and_green(router, new, drained)
            if of_the_load:  # they could not reach etcd, and only their loads tell it
                told = [replace(rank, draining=False) for rank in (*decodes, *prefills)]
                router.placer.set_ranks(told[:3], told[3:])
                for rank in (*decodes, *prefills):
                    router.waits(rank, 0, draining=rank.draining)
            else:
                router.placer.set_ranks(decodes, prefills)
            excluded = router.placer.explain(router.asked(plans=REMOTE), 0.5)
            candidates = excluded.candidates if isinstance(excluded, Nowhere) else excluded.excluded
            apart = {rank.id for rank in candidates if "layout differs" in rank.excluded}
            staying = [rank for rank in (*decodes, *prefills) if not rank.draining]
            assert apart == {rank.id for rank in staying if rank.layout != layout}
            drained_keys = {rank.id.key for rank in (*decodes, *prefills) if rank.draining}
            assert common_layout(decodes, prefills, drained_keys) == layout


def test_prefill_computes_for_the_new_ranks_once_the_old_ones_drain(subtests):
    """Blue and green: as many of each, and whoever drains is still registered for as long as it runs."""
    for half in [2, 30]:
        with subtests.test(half=half):
            router = Router(2 * half, 2 * half)
            decodes, prefills = of_other_layout(router.decodes, half), of_other_layout(router.prefills, half)
            router.placer.set_ranks([*decodes[half:], *decodes[:half]], [*prefills[half:], *prefills[:half]])
            old = (*router.decodes[half:], *router.prefills[half:])
            for draining, chosen in ((False, {1}), (True, {0}), (False, {1})):  # and they are put back
                for rank in old:
                    router.waits(rank, 0, draining=draining)
                way = router.place(plans=REMOTE).chosen
                assert {way.decode.id.rank // half, way.prefill.id.rank // half} == chosen, draining


@given(ranks=lists(tuples(sampled_from(Role), sets(sampled_from("01"), max_size=1)), max_size=8))
def test_the_adapter_that_counts_is_that_of_the_most_pairs(ranks):
    """Of one name only weights that a decode rank has, and none that more pairs could serve."""
    counts = Counter((role, digest * 32) for role, digests in ranks for digest in digests)
    registered = {
        role: [
            replace(RANK, role=role, adapters=tuple(Adapter("a", digest * 32) for digest in digests))
            for own, digests in ranks
            if own is role
        ]
        for role in Role
    }
    found = common_adapters(registered[Role.DECODE], registered[Role.PREFILL])
    decodes, prefills = ({d * 32: counts[role, d * 32] for d in "01"} for role in (Role.DECODE, Role.PREFILL))
    if not any(decodes.values()):
        assert not found
        return
    digest = found["a"].digest
    worths = {each: (decodes[each] * prefills[each], decodes[each]) for each in decodes}
    assert decodes[digest] and worths[digest] == max(worths.values())
