"""A prefill rank with one link."""

import pytest

from transfer.sending.sending_rank import Rank


@pytest.fixture
def rank():
    return Rank()
