import pytest

from services.kv.tiers.wait_or_cut import Left, TierTrust


def test_a_prefix_is_read_while_that_is_faster_than_computing_it():
    assert Left(1.0, 100, 50.0).is_worth_reading
    assert not Left(2.5, 100, 50.0).is_worth_reading
    assert Left(0.0, 100, 50.0).is_worth_reading and Left(1000.0, 100, 0.0).is_worth_reading


def test_the_wait_is_bounded_by_what_was_predicted():
    assert [Left(read_s, 1, 0.0).limit_s for read_s in (0.0, 0.001, 2.0, 1000.0)] == [1.0, 1.0, 8.0, 30.0]


def test_a_tier_is_off_for_half_a_minute_after_three_errors_in_a_row():
    trust = TierTrust()
    assert trust.seconds(1000) == 0.0
    trust.note_read(1000, 0.5)
    assert trust.seconds(4000) == pytest.approx(2.0)
    assert trust.bytes_per_s == pytest.approx(2000)
    assert [trust.note_error(10.0, reading=False) for _ in range(2)] == [False, False]
    trust.note_written()
    assert [trust.note_error(10.0, reading=True) for _ in range(2)] == [False, False]
    trust.note_written()  # It says nothing about reads.
    assert trust.note_error(10.0, reading=True)
    assert (trust.is_off(39.9), trust.is_off(40.0), trust.bytes_per_s) == (True, False, 0.0)
