"""A prefill rank with one link."""

import pytest

from transfer.sending.room_rank import Rank


@pytest.fixture
def rank():
    return Rank()
