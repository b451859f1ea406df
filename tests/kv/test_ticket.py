from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.ticket import check_layouts, check_ticket, hit_kind, make_ticket
from services.kv.transfer_plan import pages_of
from services.values.errors import ProtocolError, StaleGeneration
from services.values.kv import (
    GroupKind,
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


@pytest.mark.parametrize(
    "change, sentence",
    [
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
    ],
)
def test_refusals_say_why(change, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        check(replace(TICKET, **change))


def test_runs_may_touch():
    check(replace(TICKET, runs=(PageRun(7, 1), PageRun(6, 1), PageRun(8, 1))))


def test_layouts_may_differ_in_tp_size_only():
    check_layouts(LAYOUT, replace(LAYOUT, tp_size=4))
    for name, value in {"page_size": 8, "page_bytes": 1, "model_fingerprint": 8, "groups": ()}.items():
        with pytest.raises(ProtocolError, match=name):
            check_layouts(LAYOUT, replace(LAYOUT, **{name: value}))
