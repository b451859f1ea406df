"""These fixtures have what a router knows of its ranks, under a clock of ours."""

import pytest

from router.ranks.observed import Clock, known
from services.router.ranks.balance import Balance


@pytest.fixture
def clock_and_balance() -> tuple[Clock, Balance]:
    return known()


@pytest.fixture
def clock(clock_and_balance) -> Clock:
    return clock_and_balance[0]


@pytest.fixture
def balance(clock_and_balance) -> Balance:
    return clock_and_balance[1]
