"""What other routers have probably sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.ranks.others import LATELY_S, Lately, Presence, Reported, Requests, traffic
from services.values.rank import RankKey

RANKS = [RankKey("d", index) for index in range(4)]
sends = st.lists(st.tuples(st.floats(0.0, 0.2), st.sampled_from(RANKS), st.integers(1, 9_000)), max_size=12)


@given(sends, st.sets(st.sampled_from(RANKS)), st.floats(0.0, 0.2))
def test_what_was_sent_lately_is_known_and_nothing_else(sent, own, until_s):
    lately, now, all_sent = Lately(), 100.0, []
    for after_s, rank, tokens in sent:
        now += after_s
        lately.sent(rank, tokens, now)
        all_sent.append((now, rank, tokens))
    now += until_s
    new = [(rank, tokens) for sent_s, rank, tokens in all_sent if sent_s > now - LATELY_S]
    assert lately.tokens(own, now) == sum(tokens for rank, tokens in new if rank in own)


counts = st.builds(Requests, st.integers(0, 50), st.integers(0, 50))


@given(st.lists(st.tuples(st.sampled_from(RANKS), counts)))
def test_the_last_report_of_each_rank_counts(reports):
    reported = Reported()
    for rank, counted in reports:
        reported.update(rank, counted)
    last = dict(reports).values()
    assert reported.requests == sum(counted.all for counted in last)
    assert reported.own == sum(counted.own for counted in last)


@pytest.mark.parametrize(
    ("reported", "own", "routers", "ratio"),
    [
        (10, 10, 2, 0.0),  # nobody else sends
        (9, 10, 2, 0.0),  # some of ours are not reported yet
        (15, 10, 2, 0.5),
        (20, 10, 2, 1.0),
        (30, 10, 3, 1.0),
        (20, 10, 3, 0.5),
        (90, 10, 2, 1.0),  # this one sends little, and guesses no more than that
        (5, 0, 2, 1.0),
        (0, 0, 2, 0.0),
    ],
)
def test_traffic_of_the_others_beside_ones_own(reported, own, routers, ratio):
    assert traffic(reported, own, routers) == ratio


def test_who_sees_nobody_elses_requests_for_long_is_alone_until_some_come():
    presence = Presence()
    assert not presence.alone
    for now in range(91):
        presence.note(0.0, float(now))
        assert not presence.alone  # two routers, too, see each other's requests only now and then
    for now in range(91, 121):
        presence.note(0.0, float(now))
    assert presence.alone
    presence.note(1.0, 121.0)
    assert presence.alone
    for now in range(122, 132):
        presence.note(1.0, float(now))
    assert not presence.alone


@given(st.floats(0.0, 1.0), st.lists(st.floats(0.001, 1.0), min_size=2, max_size=20), st.integers(2, 9))
def test_between_looks_a_second_apart_more_looks_that_see_the_same_change_nothing(seen, pauses, parts):
    often, seldom, now = Presence(), Presence(), 100.0
    for presence in (often, seldom):
        presence.note(seen, now)
    for pause_s in pauses:
        for part in range(1, parts + 1):
            often.note(seen, now + pause_s * part / parts)
        now += pause_s
        seldom.note(seen, now)
    assert often._traffic == pytest.approx(seldom._traffic)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9), st.floats(1.0, 1e6))
def test_after_a_pause_one_look_decides_no_more_than_after_a_second(seen, pause_s):
    paused, awake = Presence(), Presence()
    for number, traffic_seen in enumerate(seen):
        paused.note(traffic_seen, number * pause_s)
        awake.note(traffic_seen, float(number))
    assert paused._traffic == pytest.approx(awake._traffic)


def test_the_first_look_after_a_night_changes_nobodys_mind():
    presence = Presence()
    presence.note(1.0, 0.0)
    presence.note(0.0, 30_000.0)
    assert not presence.alone
    for now in range(30_001, 30_200):
        presence.note(0.0, float(now))
    assert presence.alone
    presence.note(1.0, 60_000.0)
    assert presence.alone
