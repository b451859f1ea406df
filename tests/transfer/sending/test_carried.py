"""These tests show what a transfer writes beside the delta, once the prompt is computed: the tail of a window
and a state."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.page_digest import digest_of
from services.kv.tails import units_at
from services.kv.ticket import targets_of
from services.kv.transfer_plan import moved_bytes
from services.transfer.sending.sending_transfer import Outcome
from services.transfer.transport import Unsettled
from services.values.kv import PageId
from services.values.rank import TransferId
from transfer.sending.sending_rank import HYBRID, LAYOUT, PAGE, A, Rank, page_of

# Of a prompt of 10: tokens 5 to 9 are in the pages 1 and 2, which are 31 and 32 of the window's pool.
TAIL = [(1, 31, 600), (1, 32, 601)]
STATE = [(2, 7, 70)]


@pytest.fixture
def rank():
    return Rank(layout=HYBRID)


def group_bytes(status):
    return tuple(status.group_bytes)


def test_it_goes_out_once_the_prompt_is_computed(subtests):
    for order in ["ticket request computed", "request ticket computed", "request computed ticket"]:
        with subtests.test("it goes out with the last pages", order=order):
            rank = Rank(layout=HYBRID)
            for event in order.split():
                match event:
                    case "ticket":
                        rank.ticket()
                    case "request":
                        rank.request()
                    case "computed":
                        rank.pages(0, 10, first=40)
                        rank.carried()
                rank.turn()
            assert rank.carried_by_post == [[*TAIL, *STATE]]
            assert rank.moved == [(40, 500), (41, 501), (42, 502)]
            assert rank.take_said() == ["accepted"]
            rank.transport.land()
            rank.turn()
            assert rank.take_said() == ["landed"]
            assert group_bytes(rank.last.status) == rank.outcome.group_bytes == (300, 60, 450)
            assert rank.last.status.bytes_moved == rank.transfers.bytes_moved_total == 810
            assert rank.last.status.descriptors == rank.transfers.descriptors_total == 3

    with subtests.test("nothing of it goes out before the prompt is computed"):
        rank = Rank(layout=HYBRID)
        rank.ticket()
        rank.request()
        rank.pages(0, 8)
        rank.turn()
        rank.transport.land()
        rank.pages(8, 10)
        rank.turn()
        rank.transport.land()
        rank.turn()
        assert rank.carried_by_post == [[], []]
        assert (rank.take_said(), rank.ends) == (
            ["accepted"],
            [],
        )  # all pages have landed, and the transfer goes on
        rank.carried()
        rank.turn()
        assert rank.carried_by_post == [[], [], [*TAIL, *STATE]]
        rank.transport.land()
        rank.turn()
        assert (rank.take_said(), rank.outcome.outcome) == (["landed"], Outcome.LANDED)

    with subtests.test("a full hit has one write"):
        rank = Rank(layout=HYBRID)
        rank.ticket(prompt_len=8, prefix_len=8)
        rank.request(prompt_len=8)
        rank.turn()
        assert rank.take_said() == ["accepted"]  # the state is not known yet
        rank.pages(0, 8)
        rank.turn()
        assert rank.transport.writes == []
        rank.carried(prompt_len=8)
        rank.turn()
        rank.transport.land()
        rank.turn()
        assert rank.carried_by_post == [[(1, 30, 600), (1, 31, 601), (2, 7, 70)]]
        assert rank.moved == []
        assert (rank.take_said(), group_bytes(rank.last.status)) == (["landed"], (0, 60, 450))

    with subtests.test("a hit that decode has of the window shortens nothing"):
        # Decode holds the prompt's first page of attention; the tail comes whole.
        rank = Rank(layout=HYBRID)
        rank.ticket(prefix_len=8)
        rank.request()
        rank.pages(0, 10)
        rank.carried()
        rank.turn()
        rank.transport.land()
        rank.turn()
        assert (rank.moved, rank.carried_by_post) == ([(2, 500)], [[*TAIL, *STATE]])
        assert group_bytes(rank.last.status) == (100, 60, 450)

    with subtests.test("digests of it come after the deltas"):
        rank = Rank(layout=HYBRID)
        rank.ticket(prefix_len=4, want_digests=True)
        rank.request()
        rank.pages(0, 10, first=40)
        rank.turn()
        rank.transport.land()
        rank.turn()
        rank.carried()
        rank.turn()
        rank.transport.land()
        rank.turn()
        assert rank.take_said() == ["accepted", "landed"]
        units = [(0, 41), (0, 42), (1, 31), (1, 32), (2, 7)]
        assert list(rank.last.status.page_digests) == [
            digest_of(page_of(unit, group)) for group, unit in units
        ]


def test_no_post_is_larger_than_it_may_be_but_for_a_unit_alone(subtests):
    for max_post_bytes, posts in [
        (810, [[*TAIL, *STATE]]),
        (809, [TAIL, STATE]),
        (359, [TAIL[:1], [TAIL[1]], STATE]),  # of the third, the state alone is larger
        (300, [[], TAIL, STATE]),
        (140, [TAIL[:1], TAIL[1:], [], STATE]),  # beside a page each
        (100, [[], [], [], TAIL, STATE]),
        (20, [[], [], [], TAIL[:1], TAIL[1:], STATE]),  # a unit at least
    ]:
        with subtests.test(max_post_bytes=max_post_bytes, posts=posts):
            rank = Rank(max_post_bytes=max_post_bytes, layout=HYBRID)
            rank.ticket()
            rank.request()
            rank.pages(0, 10)
            rank.carried()
            while not rank.ends:
                rank.turn()
                assert sum(not write.done for write in rank.transport.writes) <= 2
                rank.transport.land()
            assert rank.carried_by_post == posts
            assert all(
                len(w.moves) == 1 or sum(w.group_bytes) <= max_post_bytes for w in rank.transport.writes
            )
            assert rank.outcome.group_bytes == (300, 60, 450)


def test_what_cannot_be_is_refused(subtests):
    for units, reason in [
        (([31], [7]), r"group 1 .* takes 2 pages, .* 1"),
        (([31, 32, 33], [7]), r"group 1 .* takes 2 pages, .* 3"),
        (([31, 32], [7, 8]), r"group 2 .* takes 1 slots, .* 2"),
        (([31, 32], []), r"group 2 .* takes 1 slots, .* 0"),
        (([31, 32],), "units of 1 groups are given, 2 are carried"),
        ((), "units of 0 groups are given, 2 are carried"),
    ]:
        with subtests.test("units that cannot hold it fail the transfer", units=units, reason=reason):
            rank = Rank(layout=HYBRID)
            rank.ticket()
            rank.request()
            rank.pages(0, 10)
            rank.transfers.carried_ready(A, units)
            rank.turn()
            assert rank.take_said() == ["accepted", "failed"]
            assert rank.outcome.outcome is Outcome.FAILED
            assert rank.transport.writes == []
            assert re.search(reason, rank.outcome.error)

    with subtests.test("what is carried twice fails the transfer"):
        rank = Rank(layout=HYBRID)
        rank.ticket()
        rank.request()
        rank.pages(0, 10)
        rank.carried()
        rank.carried()
        rank.turn()
        assert rank.take_said() == ["accepted", "failed"]
        assert rank.outcome.error == "what is carried was offered twice"

    with subtests.test("a target that is wrong is refused and nothing is written"):
        rank = Rank(layout=HYBRID)
        rank.request()
        rank.ticket(targets=())
        rank.pages(0, 10)
        rank.carried()
        rank.turn()
        assert (rank.take_said(), rank.transport.writes) == (["refused"], [])
        assert rank.outcome.error == "the ticket has targets of the groups [], the layout carries [1, 2]"

    with subtests.test("a delta that starts too late is renegotiated with its targets"):
        rank = Rank(layout=HYBRID)
        rank.request()
        rank.ticket(prefix_len=6, pages=[500, 501])
        assert (rank.take_said(), rank.last.status.start) == (["renegotiate"], 4)
        rank.ticket(prefix_len=4)
        rank.pages(0, 10)
        rank.carried()
        rank.turn()
        rank.transport.land()
        rank.turn()
        assert rank.take_said() == ["accepted", "landed"]
        assert group_bytes(rank.last.status) == (200, 60, 450)


# -- ends -----------------------------------------------------------------------------------------------


def test_ends_of_transfers_that_carry(subtests):
    ends = {
        "abort": lambda transfers: transfers.abort(1, A),
        "cancel": lambda transfers: transfers.cancel_transfer(A),
        "fail": lambda transfers: transfers.fail_transfer(A, "out of memory"),
        "link lost": lambda transfers: transfers.link_lost(1),
    }
    for name, end in ends.items():
        with subtests.test("its units stay until what is posted has ended", end=name):
            rank = Rank(layout=HYBRID)
            rank.ticket()
            rank.request()
            rank.pages(0, 10)
            rank.turn()
            rank.carried()
            rank.turn()
            pages, carried = rank.transport.writes
            end(rank.transfers)
            pages.done = True
            rank.turn()
            assert rank.ends == []
            carried.done = True
            rank.turn()
            assert rank.outcome.outcome is not Outcome.LANDED
            assert rank.outcome.group_bytes == (300, 60, 450)

    for end in ["abort", "cancel"]:
        with subtests.test("what is not posted when the transfer ends never is", end=end):
            rank = Rank(layout=HYBRID)
            rank.ticket()
            rank.request()
            rank.pages(0, 10)
            rank.turn()
            rank.transfers.abort(1, A) if end == "abort" else rank.transfers.cancel_transfer(A)
            rank.carried()
            rank.transport.land()
            rank.turn()
            assert rank.carried_by_post == [[]]
            assert rank.outcome.outcome is Outcome.ABORTED
            rank.carried()  # as the engine may say after the end

    with subtests.test("a write that fails with its end unknown keeps the units"):
        rank = Rank(layout=HYBRID)
        rank.ticket()
        rank.request()
        rank.pages(0, 10)
        rank.turn()
        rank.transport.land()
        rank.turn()
        rank.transport.fails_posts = Unsettled
        rank.carried()
        rank.turn()
        assert rank.take_said() == ["accepted", "failed"]
        assert rank.last.status.unsettled
        assert rank.ends == []
        rank.now_s += 20.0  # lease and margin are over
        rank.turn()
        assert rank.outcome.group_bytes == (300, 0, 0)

    with subtests.test("after the lease it is not posted"):
        rank = Rank(layout=HYBRID)
        rank.ticket(until_s=110.0)
        rank.request()
        rank.pages(0, 10)
        rank.turn()
        rank.transport.land()
        rank.now_s = 110.0
        rank.carried()
        rank.turn()
        assert (rank.take_said(), rank.carried_by_post) == (["accepted", "failed"], [[]])
        assert rank.outcome.error == "the write lease is over"

    with subtests.test("a write of it that does not end fails the transfer"):
        rank = Rank(layout=HYBRID)
        rank.ticket(until_s=1000.0)
        rank.request()
        rank.pages(0, 10)
        rank.turn()
        rank.transport.land()
        rank.turn()
        rank.carried()
        rank.turn()
        rank.now_s += 31.0
        rank.turn()
        assert [transfer_id for transfer_id, _ in rank.failed] == [A] and rank.ends == []
        rank.transport.land()
        rank.turn()
        assert rank.outcome.outcome is Outcome.FAILED


def test_transfers_of_other_layouts_and_other_transfers(subtests):
    with subtests.test("a layout of one group tells no bytes by group"):
        rank = Rank(layout=LAYOUT)
        rank.write(A).done = True
        rank.turn()
        assert (group_bytes(rank.last.status), rank.outcome.group_bytes) == ((), (300,))

    with subtests.test("transfers do not mix what they carry"):
        rank = Rank(layout=HYBRID)
        for transfer_id in (TransferId(1), TransferId(2)):
            rank.request(transfer_id)
            rank.ticket(transfer_id)
            rank.pages(0, 10, transfer_id)
        rank.transfers.carried_ready(TransferId(2), ([PageId(35), PageId(36)], [PageId(8)]))
        rank.turn()
        assert rank.carried_by_post == [[], [(1, 35, 600), (1, 36, 601), (2, 8, 70)]]


# -- against zip() --------------------------------------------------------------------------------------


@given(data=st.data())
def test_every_unit_is_written_once_to_where_the_ticket_says(data):
    prompt_len = data.draw(st.integers(1, 60))
    num_pages = -(-prompt_len // PAGE)
    held = data.draw(st.integers(0, prompt_len // PAGE))

    def draw_units(count):
        return [PageId(unit) for unit in data.draw(st.permutations(range(count + 3)))[:count]]

    sources, targets = draw_units(num_pages), draw_units(num_pages - held)
    counts = [units_at(group, prompt_len, PAGE) for group in HYBRID.carried]
    carried = [(draw_units(count), draw_units(count)) for count in counts]
    rank = Rank(max_post_bytes=data.draw(st.integers(1, 1200)), layout=HYBRID)

    def ticket():
        group_targets = targets_of(HYBRID, prompt_len, [units for _, units in carried])
        rank.ticket(prompt_len=prompt_len, prefix_len=held * PAGE, pages=targets, targets=group_targets)

    cut = data.draw(st.integers(0, num_pages - 1)) * PAGE
    events = [lambda: rank.request(prompt_len=prompt_len)]
    for start, end in ((0, cut), (cut, prompt_len)):
        pages = sources[start // PAGE : -(-end // PAGE)]
        events.append(
            lambda start=start, end=end, pages=pages: rank.transfers.pages_ready(A, start, end, pages)
        )
    events.append(lambda: rank.transfers.carried_ready(A, [units for units, _ in carried]))
    events.insert(data.draw(st.integers(0, len(events))), ticket)
    rank.interleave(events, data)

    assert Counter(rank.moved) == Counter(zip(sources[held:], targets, strict=True))
    due = [(i, *pair) for i, lane in enumerate(carried, 1) for pair in zip(*lane, strict=True)]
    assert [unit for post in rank.carried_by_post for unit in post] == due
    assert rank.outcome.group_bytes == moved_bytes(held * PAGE, prompt_len, HYBRID)
    assert rank.take_said() == ["accepted", "landed"]
