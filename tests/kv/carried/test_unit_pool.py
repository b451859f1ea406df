"""Units with any number of holders."""

import pytest

from services.kv.page_allocator import UnitPool
from services.values.errors import NoCapacity, ProtocolError


def test_a_unit_is_free_again_when_its_last_holder_drops_it():
    pool = UnitPool(3)
    units = pool.take(2)
    pool.share(units[:1])
    pool.drop(units)
    assert (pool.free_units, pool.holders_of(units[0]), pool.holders_of(units[1])) == (2, 1, 0)
    pool.drop(units[:1])
    assert pool.free_units == 3


def test_what_nobody_holds_is_neither_shared_nor_dropped():
    pool = UnitPool(2)
    for call in (pool.share, pool.drop):
        with pytest.raises(ProtocolError, match="unit 1"):
            call([1])


def test_no_more_is_taken_than_there_is():
    pool = UnitPool(2)
    with pytest.raises(NoCapacity):
        pool.take(3)
    assert pool.free_units == 2
