"""Against sorting anew."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.ranks.rank_order import LoadOrder
from services.values.rank import RankKey

ranks = st.builds(RankKey, st.just("d"), st.integers(0, 9))
loads = st.tuples(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 100), st.integers(0, 2))


@given(st.dictionaries(ranks, loads, min_size=1), st.data())
def test_it_is_sorted_whatever_changes(table, data):
    order = LoadOrder(table.items())
    changes = data.draw(st.lists(st.tuples(st.sampled_from(sorted(table)), loads), max_size=20))
    for rank, load in changes:
        order.update(rank, load)
        table[rank] = load
    assert list(order) == sorted(table, key=lambda rank: (table[rank], rank))
    assert len(order) == len(table)
    some = data.draw(st.sets(ranks))  # and others
    assert list(order.ascending(some)) == [rank for rank in order if rank in some]
    before = data.draw(st.sampled_from(sorted(table)))
    ahead = list(order)[: list(order).index(before)]
    assert list(order.ascending(some, before)) == [rank for rank in ahead if rank in some]
