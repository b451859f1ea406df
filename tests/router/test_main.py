"""A router's garbage collector searches rarely, and does search."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.router.__main__ import _collect_rarely


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def rarely() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    _collect_rarely()
    yield
    gc.set_threshold(*before)


def left_of(count: int) -> int:
    """Make so many cycles that nobody holds, and return how many are left."""
    made = weakref.WeakSet[Cycle]()
    for _ in range(count):
        made.add(Cycle())
    return len(made)


def test_some_cycles_start_no_search() -> None:
    assert left_of(2_000) == 2_000


def test_many_cycles_are_found() -> None:
    assert left_of(20_000) < 20_000
