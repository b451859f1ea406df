"""What a router knows of its ranks, under a clock of ours."""

import pytest

from router.ranks.observed import PRIOR_BANDWIDTH, PRIOR_RATE, Clock
from services.router.ranks.balance import Balance


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def balance(clock) -> Balance:
    return Balance(clock, prior_tokens_per_s=PRIOR_RATE, prior_bandwidth=PRIOR_BANDWIDTH, chunk_tokens=1_000)
