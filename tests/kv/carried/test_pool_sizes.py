import pytest

from services.kv.tails import PoolSizes, units_for
from services.values.kv import GroupKind, KvGroup

WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (0,), 2, 16, "float32", window=128)
STATE = KvGroup(GroupKind.RECURRENT, (1,), 0, 0, "float32")


def test_by_default_the_running_sequences_fit_and_checkpoints():
    sizes = PoolSizes(max_running_requests=8, chunk_size=64)
    # A window of 128 and a chunk of 64 lie in 13 pages of 16 at most.
    assert sizes.num_units(WINDOW, 16, 10_000) == 2 * 8 * 13
    assert sizes.num_units(STATE, 16, 10_000) == 2 * 8 + 32


def test_a_long_chunk_counts_once():
    short, long = (PoolSizes(max_running_requests=8, chunk_size=size) for size in (512, 2048))
    # A window of 128 and 512 tokens lie in 41 pages of 16 at most; 1,536 more tokens take 96.
    assert short.num_units(WINDOW, 16, 10_000) == 2 * 8 * 41
    assert long.num_units(WINDOW, 16, 10_000) == 2 * 8 * 41 + 96


@pytest.mark.parametrize(("num_pages", "expected"), [(100, 100), (4, 13)])
def test_a_window_has_no_more_pages_than_full_attention_but_for_one_sequence(num_pages, expected):
    sizes = PoolSizes(max_running_requests=8, chunk_size=64)
    assert sizes.num_units(WINDOW, 16, num_pages) == expected


def test_a_sequence_needs_what_takes_it_on_by_a_token_and_all_together_a_chunk():
    assert units_for(STATE, 16, 64, 5) == 5
    # With the next token a window of 128 lies in 9 pages at most; a chunk of 64 takes 4 more.
    assert units_for(WINDOW, 16, 64, 1) == 9 + 4
    assert units_for(WINDOW, 16, 64, 5) == 5 * 9 + 4


def test_what_is_set_holds():
    sizes = PoolSizes(num_window_pages=7, num_slots=9)
    assert (sizes.num_units(WINDOW, 16, 100), sizes.num_units(STATE, 16, 100)) == (7, 9)
