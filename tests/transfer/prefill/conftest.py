"""A prefill rank with one link."""

import pytest

from transfer.prefill.room_rank import Rank


@pytest.fixture
def rank():
    return Rank()
