from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.ticket import check_layouts, check_ticket, hit_kind, make_ticket, targets_of
from services.kv.transfer_plan import pages_of
from services.values.errors import ProtocolError, StaleGeneration
from services.values.kv import (
    GroupKind,
    GroupTarget,
    HitKind,
    KvGroup,
    KvLayout,
    PageRun,
    PoolMemory,
)

GROUP = KvGroup(GroupKind.FULL_ATTENTION, (0, 1), num_kv_heads=2, head_dim=8, dtype="float32")
LAYOUT = KvLayout(page_size=4, page_bytes=64, model_fingerprint=7, groups=(GROUP,))
MEMORY = PoolMemory(base_address=0, num_pages=16)
GENERATION = 0xABC
TICKET = make_ticket(1, GENERATION, 14, 4, [6, 7, 3], write_until_s=5.0)


def check(ticket, prompt_len=14):
    check_ticket(ticket, prompt_len, LAYOUT, [MEMORY], GENERATION)


@pytest.mark.parametrize(
    "prefix, prompt, kind",
    [(0, 0, HitKind.NONE), (0, 8, HitKind.NONE), (4, 8, HitKind.PARTIAL), (8, 8, HitKind.FULL)],
)
def test_hit_kind(prefix, prompt, kind):
    assert hit_kind(prefix, prompt) is kind


@pytest.mark.parametrize("prefix, prompt", [(-4, 8), (12, 8)])
def test_hit_kind_refuses_what_is_no_prefix(prefix, prompt):
    with pytest.raises(ProtocolError):
        hit_kind(prefix, prompt)


@given(st.integers(1, 60), st.data())
def test_what_is_made_passes_the_check(prompt_len, data):
    prefix_pages = data.draw(st.integers(0, prompt_len // 4))
    num_pages = -(-prompt_len // 4) - prefix_pages
    pages = data.draw(st.permutations(range(16)))[:num_pages]
    ticket = make_ticket(1, GENERATION, prompt_len, prefix_pages * 4, pages, write_until_s=5.0)
    check(ticket, prompt_len)
    check(ticket, None)
    assert pages_of(ticket.runs) == pages


def test_a_ticket_names_its_runs_in_token_order():
    assert TICKET.runs == (PageRun(6, 2), PageRun(3, 1))
    check(TICKET)


def test_a_full_hit_has_no_runs():
    ticket = make_ticket(1, GENERATION, 8, 8, [], write_until_s=5.0)
    assert ticket.runs == ()
    check(ticket, 8)


@pytest.mark.parametrize("prompt_len, prefix, pages", [(8, 8, [1]), (8, 4, []), (8, 12, [1])])
def test_make_ticket_refuses(prompt_len, prefix, pages):
    with pytest.raises(ProtocolError):
        make_ticket(1, GENERATION, prompt_len, prefix, pages, write_until_s=5.0)


def test_a_ticket_for_another_life_is_stale():
    with pytest.raises(StaleGeneration, match="0000000000000abd"):
        check(replace(TICKET, prefill_generation=GENERATION + 1))


def test_refusals_say_why(subtests):
    for change, sentence in [
        ({"decode_prefix_len": 6}, "within the page from 4 on"),
        ({"decode_prefix_len": 16}, "not one of 14 tokens"),
        ({"decode_prefix_len": -4}, "not one of 14 tokens"),
        ({"prompt_len": 15}, "15 prompt tokens, the request 14"),
        ({"runs": (PageRun(6, 2),)}, "covers 3 pages, the ticket's runs 2"),
        ({"runs": (PageRun(6, 4),)}, "covers 3 pages, the ticket's runs 4"),
        ({"runs": ()}, "covers 3 pages, the ticket's runs 0"),
        ({"runs": (PageRun(6, 2), PageRun(16, 1))}, "page 16 is outside of the peer's pool of 16"),
        ({"runs": (PageRun(14, 3),)}, "page 16 is outside of the peer's pool of 16"),
        ({"runs": (PageRun(6, 2), PageRun(7, 1))}, "page 7 appears twice"),
        ({"runs": (PageRun(6, 1), PageRun(5, 2))}, "page 6 appears twice"),
        ({"write_until_s": float("inf")}, "never end"),
        ({"write_until_s": float("nan")}, "never end"),
    ]:
        with subtests.test(sentence, change=change), pytest.raises(ProtocolError, match=sentence):
            check(replace(TICKET, **change))


def test_runs_may_touch():
    check(replace(TICKET, runs=(PageRun(7, 1), PageRun(6, 1), PageRun(8, 1))))


def test_layouts_may_differ_in_tp_size_only():
    check_layouts(LAYOUT, replace(LAYOUT, tp_size=4))
    for name, value in {"page_size": 8, "page_bytes": 1, "model_fingerprint": 8, "groups": ()}.items():
        with pytest.raises(ProtocolError, match=name):
            check_layouts(LAYOUT, replace(LAYOUT, **{name: value}))


# -- what is carried ------------------------------------------------------------------------------------

WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (2,), 2, 8, "float32", window=6, unit_bytes=16)
CHUNKED = KvGroup(GroupKind.CHUNKED_WINDOW, (3,), 2, 8, "float32", window=8, unit_bytes=16)
STATE = KvGroup(GroupKind.RECURRENT, (4, 5), 0, 0, "float32", unit_bytes=900)
HYBRID = replace(LAYOUT, groups=(GROUP, WINDOW, CHUNKED, STATE))
POOLS = (MEMORY, PoolMemory(0, 10), PoolMemory(0, 8), PoolMemory(0, 4))


def hybrid_ticket(prompt_len=14, prefix=4, pages=(6, 7, 3), carried=((9, 2), (0, 1), (3,))):
    targets = targets_of(HYBRID, prompt_len, carried)
    return make_ticket(1, GENERATION, prompt_len, prefix, pages, 5.0, targets=targets)


def check_hybrid(ticket, prompt_len=14, layout=HYBRID, pools=POOLS):
    check_ticket(ticket, prompt_len, layout, pools, GENERATION)


def tokens_seen(group, prompt_len):
    """Of the prompt, by the token that follows it: token by token."""
    if group.kind is GroupKind.SLIDING_WINDOW:
        return [token for token in range(prompt_len) if token > prompt_len - group.window]
    return [token for token in range(prompt_len) if token // group.window == prompt_len // group.window]


def test_a_ticket_says_where_tails_and_state_go():
    ticket = hybrid_ticket()
    assert ticket.targets == (
        GroupTarget(1, 8, (PageRun(9, 1), PageRun(2, 1))),  # tokens 9 to 13
        GroupTarget(2, 8, (PageRun(0, 2),)),  # the chunk [8, 16)
        GroupTarget(3, 14, (PageRun(3, 1),)),
    )
    check_hybrid(ticket)


@pytest.mark.parametrize("prompt_len", [8, 16])
def test_a_full_hit_has_targets_all_the_same(prompt_len):
    carried = ((4, 5), (), (0,))  # the next token begins a chunk
    ticket = hybrid_ticket(prompt_len, prompt_len, (), carried)
    assert ticket.runs == () and ticket.targets[1] == GroupTarget(2, prompt_len, ())
    check_hybrid(ticket, prompt_len)


@given(st.integers(1, 40), st.data())
def test_targets_hold_exactly_what_the_next_token_sees(prompt_len, data):
    carried, counts = [], []
    for group, pool in zip(HYBRID.carried, POOLS[1:], strict=True):
        if group is STATE:
            counts.append(1)
        else:
            counts.append(len({token // 4 for token in tokens_seen(group, prompt_len)}))
        carried.append(data.draw(st.permutations(range(pool.num_pages)))[: counts[-1]])
    num_pages = -(-prompt_len // 4)
    ticket = hybrid_ticket(prompt_len, 0, range(num_pages), carried)
    check_hybrid(ticket, prompt_len, pools=(PoolMemory(0, 100), *POOLS[1:]))
    for group, target, units in zip(HYBRID.carried, ticket.targets, carried, strict=True):
        assert pages_of(target.runs) == units
        seen = [] if group is STATE else tokens_seen(group, prompt_len)
        assert target.start_token == (seen[0] // 4 * 4 if seen else prompt_len)

    wrong = data.draw(st.integers(0, 2))
    carried[wrong] = data.draw(
        st.lists(st.integers(0, 3), unique=True).filter(lambda u: len(u) != counts[wrong])
    )
    with pytest.raises(ProtocolError, match=rf"group {wrong + 1} .* takes {counts[wrong]} "):
        hybrid_ticket(prompt_len, 0, range(num_pages), carried)


def test_units_of_other_groups_than_are_carried_are_refused():
    with pytest.raises(ProtocolError, match="units of 2 groups are given, 3 are carried"):
        hybrid_ticket(carried=((9, 2), (0, 1)))
    with pytest.raises(ProtocolError, match="units of 1 groups are given, 0 are carried"):
        targets_of(LAYOUT, 14, ((0,),))
    assert targets_of(LAYOUT, 14, ()) == ()


def with_target(group, **change):
    """The hybrid's targets, one of them changed."""
    return tuple(
        replace(target, **change) if target.group == group else target for target in hybrid_ticket().targets
    )


TARGETS = hybrid_ticket().targets


def test_targets_that_are_not_right_are_refused(subtests):
    for targets, sentence in [
        ((), r"targets of the groups \[\], the layout carries \[1, 2, 3\]"),
        (TARGETS[:2], r"groups \[1, 2\], the layout carries"),
        (TARGETS[1:], r"groups \[2, 3\], the layout carries"),
        ((*TARGETS, replace(TARGETS[2], group=4)), r"groups \[1, 2, 3, 4\], the layout carries"),
        ((replace(TARGETS[0], group=0), *TARGETS[1:]), r"groups \[0, 2, 3\]"),
        ((TARGETS[0], *TARGETS), r"groups \[1, 1, 2, 3\]"),
        ((TARGETS[1], TARGETS[0], TARGETS[2]), r"groups \[2, 1, 3\]"),
        (with_target(1, start_token=4), r"group 1 \(sliding_window\) starts at token 8, .* at 4"),
        (with_target(2, start_token=12), r"group 2 \(chunked_window\) starts at token 8, .* at 12"),
        (with_target(3, start_token=8), r"group 3 \(recurrent\) starts at token 14, .* at 8"),
        (with_target(1, runs=(PageRun(9, 1),)), "group 1 .* takes 2 pages, the ticket's target has 1"),
        (with_target(2, runs=(PageRun(0, 3),)), "group 2 .* takes 2 pages, the ticket's target has 3"),
        (with_target(3, runs=()), "group 3 .* takes 1 slots, the ticket's target has 0"),
        (with_target(1, runs=(PageRun(9, 2),)), "group 1 .* page 10 is outside of the peer's pool of 10"),
        (with_target(2, runs=(PageRun(8, 1), PageRun(0, 1))), "group 2 .* page 8 is outside .* of 8"),
        (with_target(3, runs=(PageRun(4, 1),)), "group 3 .* slot 4 is outside of the peer's pool of 4"),
        (with_target(1, runs=(PageRun(5, 1), PageRun(5, 1))), "group 1 .* page 5 appears twice"),
    ]:
        with subtests.test(sentence), pytest.raises(ProtocolError, match=sentence):
            check_hybrid(replace(hybrid_ticket(), targets=targets))


def test_a_group_that_the_layout_has_not_is_refused():
    with pytest.raises(ProtocolError, match=r"groups \[1, 2, 3\], the layout carries \[\]"):
        check_hybrid(hybrid_ticket(), layout=LAYOUT)
    with pytest.raises(ProtocolError, match=r"groups \[\], the layout carries \[1, 2, 3\]"):
        check_hybrid(TICKET)


def test_units_of_different_groups_may_have_one_number():
    check_hybrid(hybrid_ticket(pages=(0, 1, 2), carried=((0, 1), (1, 0), (0,))))
