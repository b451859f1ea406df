"""What a step costs, learned from steps whose cost is known."""

import pytest

from services.engine.paged.queue.step_time import StepTimes


def learned(batches, fixed_s=0.010, per_sequence_s=0.002, prompt_rate=None):
    times = StepTimes()
    for batch in batches:
        times.note(batch, 0, fixed_s + per_sequence_s * batch)
        if prompt_rate:
            times.note(batch, 64, fixed_s + per_sequence_s * batch + 64 / prompt_rate)
    return times


def test_learns_the_line():
    times = learned([1, 2, 3, 4])
    assert times.decode_s(16) == pytest.approx(0.042)
    assert times.decode_s(0) == 0.0


def test_a_batch_is_allowed_as_far_as_it_holds_the_target():
    times = learned([8, 9, 10, 11, 12])
    assert times.allows(15, target_s=0.040)
    assert not times.allows(16, target_s=0.040)


def test_nothing_is_allowed_far_beyond_what_was_seen_but_one_always_is():
    assert StepTimes().allows(4, 0.001)
    assert not StepTimes().allows(5, 0.001)
    assert learned([4] * 5).allows(6, target_s=9.0)
    assert not learned([4] * 5).allows(7, target_s=9.0)
    assert not learned([3, 4, 5]).allows(9, target_s=9.0)
    assert learned([1] * 5).allows(1, target_s=0.001)


def test_those_that_receive_are_bounded_by_what_they_will_cost_alone():
    times = learned([3, 4, 5])
    assert not times.allows(15, target_s=0.041)
    assert times.allows(15, target_s=0.041, receiving=10)
    assert not times.allows(16, target_s=0.041, receiving=10)
    assert not times.allows(15, target_s=0.041, receiving=6)  # 9 that decode are far from what was seen
    assert not StepTimes().allows(5, 9.0, receiving=4)


def test_where_no_slope_is_known_one_that_receives_may_cost_as_much_as_those_seen():
    times = learned([1] * 20)  # 12 ms
    assert times.allows(9, target_s=0.1, receiving=7)
    assert not times.allows(10, target_s=0.1, receiving=8)


def test_with_one_size_seen_the_next_one_is_tried():
    assert learned([6] * 20).allows(7, target_s=0.0221)
    assert not learned([6] * 20).allows(7, target_s=0.0219)


def test_old_steps_fade():
    times = learned([8, 9, 10] * 20)
    for batch in [8, 9, 10] * 100:
        times.note(batch, 0, 0.100)
    assert times.decode_s(9) == pytest.approx(0.100, rel=0.05)


def test_a_chunk_takes_what_the_target_leaves():
    times = learned([8, 9, 10, 11], prompt_rate=1000.0)
    assert times.prompt_tokens_per_s == pytest.approx(1000.0, rel=0.05)
    spare_s = 0.130 - 0.030
    assert times.chunk_tokens(10, 0.130, limit=512) == pytest.approx(1000 * spare_s, rel=0.1)
    assert times.chunk_tokens(10, 0.031, limit=512) == 16  # a prompt must be done some time
    assert times.chunk_tokens(10, 0.031, limit=8) == 8
    assert times.chunk_tokens(0, 0.031, limit=512) == 512  # nobody's tokens come later for it
    assert times.chunk_tokens(10, None, limit=512) == 512


def test_the_rate_that_is_told_is_what_a_newcomer_would_get():
    times = learned([8, 9, 10, 11], prompt_rate=1000.0)
    assert times.effective_tokens_per_s(0, 512) == pytest.approx(1000.0, rel=0.05)
    assert times.effective_tokens_per_s(10, 100) == pytest.approx(100 / 0.130, rel=0.05)
    assert StepTimes().effective_tokens_per_s(3, 100) == 0.0


@pytest.mark.parametrize(("num_decoding", "prompt_tokens"), [(0, 32), (4, 0), (4, 32)])
def test_a_step_in_which_the_process_was_stopped_says_little(num_decoding, prompt_tokens):
    times = StepTimes()
    for _ in range(3):
        times.note(4, 0, 0.02)
        times.note(0, 32, 0.05)
    times.note(num_decoding, prompt_tokens, 33.0)
    assert times.prompt_tokens_per_s > 32 / 0.05 / 3
    assert times.decode_s(4) < 0.02 * 3


def test_who_has_become_slower_is_believed():
    times = StepTimes()
    for took_s in [0.05] * 20 + [1.0] * 300:
        times.note(0, 32, took_s)
        times.note(4, 0, took_s)
    assert times.prompt_tokens_per_s == pytest.approx(32, rel=0.1)
    assert times.decode_s(4) == pytest.approx(1.0, rel=0.1)


def with_drafts(steps, draft_s=0.001, fixed_s=0.010, per_sequence_s=0.002):
    times = StepTimes()
    for batch, drafts in steps:
        times.note(batch, 0, fixed_s + per_sequence_s * batch + draft_s * drafts, drafts)
    return times


@pytest.mark.parametrize("steps", [[(1, 0), (1, 5)] * 20, [(16, 0), (15, 3), (16, 9), (12, 1)] * 20])
def test_learns_what_drafts_cost(steps):
    times = with_drafts(steps)
    assert times.draft_s == pytest.approx(0.001, rel=0.1)
    batch = steps[0][0]
    assert times.decode_s(batch) == pytest.approx(0.010 + 0.002 * batch, rel=0.03)
    assert times.decode_s(batch, 10) == pytest.approx(0.020 + 0.002 * batch, rel=0.05)


def test_what_a_sequence_costs_is_not_laid_on_its_drafts():
    """Its context is read once, whoever many drafts it has."""
    steps = [(batch, drafts) for batch in (1, 2, 3, 4) for drafts in (0, 1, 4)] * 5
    times = with_drafts(steps, draft_s=0.0001, per_sequence_s=0.02)
    assert times.draft_s == pytest.approx(0.0001, rel=0.3)
    assert times.decode_s(8) == pytest.approx(0.17, rel=0.02)


def test_before_any_drafts_rows_are_alike_and_eight_are_fixed():
    assert StepTimes().draft_s == 0.0
    assert learned([1] * 5, 0.008, 0.001).draft_s == pytest.approx(0.001)
    assert learned([16] * 5, 0.008, 0.001).draft_s == pytest.approx(0.001)


def test_what_drafts_cost_is_kept_while_there_are_none_or_always_as_many():
    dear = with_drafts([(1, 0), (1, 5)] * 20, draft_s=0.006)
    cheap = with_drafts([(1, 0), (1, 5)] * 20, draft_s=0.0001)
    for _ in range(300):
        dear.note(1, 0, 0.012)
        cheap.note(1, 0, 0.0125, 5)
    assert dear.draft_s > 0.002  # unmeasured it would be 1.3 ms
    assert cheap.draft_s < 0.0005
    for _ in range(5000):
        dear.note(1, 0, 0.012)
    assert dear.draft_s < 0.0015  # may be tried again


def test_drafts_count_beside_a_prompt():
    times = with_drafts([(4, 0), (4, 8)] * 20)
    for _ in range(20):
        times.note(4, 64, 0.018 + 0.008 + 0.064, 8)
    assert times.prompt_tokens_per_s == pytest.approx(1000, rel=0.05)
    assert times.chunk_tokens(4, 0.126, 512, 8) == pytest.approx(100, rel=0.1)
    assert times.chunk_tokens(4, 0.126, 512) == pytest.approx(108, rel=0.1)
