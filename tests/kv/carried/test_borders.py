"""These tests show where a sequence that computes keeps checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.checkpoints import borders_to_keep, shared_border


@pytest.mark.parametrize(
    ("resumed", "matched", "num_tokens", "borders"),
    [
        (0, 0, 3, []),
        (0, 0, 4, []),  # the last token is computed for its logits: who repeats the prompt begins before it
        (0, 0, 5, [4]),
        (0, 0, 30, [16, 28]),  # a stride of 16, and the last one
        (4, 10, 15, [8, 12]),  # where what matched ends, another prompt has branched off
        (8, 8, 15, [12]),
        (12, 14, 15, []),
    ],
)
def test_borders_are_kept_where_they_are_likely_to_be_wanted(resumed, matched, num_tokens, borders):
    assert borders_to_keep(resumed, matched, num_tokens, block=4, stride=16) == borders


def test_a_border_is_one_of_blocks_whatever_the_stride():
    assert borders_to_keep(0, 0, 30, block=4, stride=10) == [12, 24, 28]


IDS = st.lists(st.integers(0, 1), min_size=1)


@given(IDS, IDS, st.integers(1, 4), st.integers(0, 100))
def test_a_shared_border_ends_the_longest_prefix_of_both_in_blocks(one, other, block, known):
    both = [n for n in range(min(len(one), len(other))) if one[:n] == other[:n] and n % block == 0]
    assert shared_border(one, other, block) == max(both)
    assert shared_border(one, other, block, known=both[known % len(both)]) == max(both)
