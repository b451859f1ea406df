"""A router's garbage collector looks rarely, and does look."""

import gc
import weakref

import pytest

from services.router.__main__ import _collect_rarely


class Circle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def rarely():
    before = gc.get_threshold()
    gc.collect()
    _collect_rarely()
    yield
    gc.set_threshold(*before)


def circles(count):
    """So many that nobody holds; what is left of them."""
    made = weakref.WeakSet()
    for _ in range(count):
        made.add(Circle())
    return len(made)


def test_some_circles_make_it_look_at_nothing():
    assert circles(2_000) == 2_000


def test_many_circles_are_found():
    assert circles(20_000) < 20_000
