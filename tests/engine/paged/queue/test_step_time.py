"""These tests show what a step costs, learned from steps whose cost is known."""

import pytest

from services.engine.paged.step_time import StepTimes


def learned(batches, fixed_s=0.010, per_sequence_s=0.002, prompt_rate=None):
    times = StepTimes()
    for batch in batches:
        times.note(batch, 0, fixed_s + per_sequence_s * batch)
        if prompt_rate:
            times.note(batch, 64, fixed_s + per_sequence_s * batch + 64 / prompt_rate)
    return times


def test_what_is_learned_of_steps(subtests):
    with subtests.test("learns the line"):
        times = learned([1, 2, 3, 4])
        assert times.decode_s(16) == pytest.approx(0.042)
        assert times.decode_s(0) == 0.0

    with subtests.test("old steps fade"):
        times = learned([8, 9, 10] * 20)
        for batch in [8, 9, 10] * 100:
            times.note(batch, 0, 0.100)
        assert times.decode_s(9) == pytest.approx(0.100, rel=0.05)

    for num_decoding, prompt_tokens in [(0, 32), (4, 0), (4, 32)]:
        with subtests.test(
            "a step in which the process was stopped says little",
            num_decoding=num_decoding,
            prompt_tokens=prompt_tokens,
        ):
            times = StepTimes()
            for _ in range(3):
                times.note(4, 0, 0.02)
                times.note(0, 32, 0.05)
            times.note(num_decoding, prompt_tokens, 33.0)
            assert times.prompt_tokens_per_s > 32 / 0.05 / 3
            assert times.decode_s(4) < 0.02 * 3

    with subtests.test("who has become slower is believed"):
        times = StepTimes()
        for took_s in [0.05] * 20 + [1.0] * 300:
            times.note(0, 32, took_s)
            times.note(4, 0, took_s)
        assert times.prompt_tokens_per_s == pytest.approx(32, rel=0.1)
        assert times.decode_s(4) == pytest.approx(1.0, rel=0.1)


def test_which_batches_are_allowed(subtests):
    with subtests.test("a batch is allowed as far as it holds the target"):
        times = learned([8, 9, 10, 11, 12])
        assert times.allows(15, target_s=0.040)
        assert not times.allows(16, target_s=0.040)

    with subtests.test("nothing is allowed far beyond what was seen but one always is"):
        assert StepTimes().allows(4, 0.001)
        assert not StepTimes().allows(5, 0.001)
        assert learned([4] * 5).allows(6, target_s=9.0)
        assert not learned([4] * 5).allows(7, target_s=9.0)
        assert not learned([3, 4, 5]).allows(9, target_s=9.0)
        assert learned([1] * 5).allows(1, target_s=0.001)

    with subtests.test("those that receive are bounded by what they will cost alone"):
        times = learned([3, 4, 5])
        assert not times.allows(15, target_s=0.041)
        assert times.allows(15, target_s=0.041, receiving=10)
        assert not times.allows(16, target_s=0.041, receiving=10)
        assert not times.allows(15, target_s=0.041, receiving=6)  # 9 that decode are far from what was seen
        assert not StepTimes().allows(5, 9.0, receiving=4)

    with subtests.test("where no slope is known one that receives may cost as much as those seen"):
        times = learned([1] * 20)  # 12 ms
        assert times.allows(9, target_s=0.1, receiving=7)
        assert not times.allows(10, target_s=0.1, receiving=8)

    with subtests.test("with one size seen the next one is tried"):
        assert learned([6] * 20).allows(7, target_s=0.0221)
        assert not learned([6] * 20).allows(7, target_s=0.0219)


def test_prompt_chunks_beside_tokens(subtests):
    with subtests.test("a chunk takes what the target leaves"):
        times = learned([8, 9, 10, 11], prompt_rate=1000.0)
        assert times.prompt_tokens_per_s == pytest.approx(1000.0, rel=0.05)
        spare_s = 0.130 - 0.030
        assert times.chunk_tokens(10, 0.130, limit=512) == pytest.approx(1000 * spare_s, rel=0.1)
        assert times.chunk_tokens(10, 0.031, limit=512) == 16  # a prompt must be done some time
        assert times.chunk_tokens(10, 0.031, limit=8) == 8
        assert times.chunk_tokens(0, 0.031, limit=512) == 512  # nobody's tokens come later for it
        assert times.chunk_tokens(10, None, limit=512) == 512

    with subtests.test("the rate that is told is what a newcomer would get"):
        times = learned([8, 9, 10, 11], prompt_rate=1000.0)
        assert times.effective_tokens_per_s(0, 512) == pytest.approx(1000.0, rel=0.05)
        assert times.effective_tokens_per_s(10, 100) == pytest.approx(100 / 0.130, rel=0.05)
        assert StepTimes().effective_tokens_per_s(3, 100) == 0.0


def with_drafts(steps, draft_s=0.001, fixed_s=0.010, per_sequence_s=0.002):
    times = StepTimes()
    for batch, drafts in steps:
        times.note(batch, 0, fixed_s + per_sequence_s * batch + draft_s * drafts, drafts)
    return times


def test_what_drafts_cost(subtests):
    for steps in [[(1, 0), (1, 5)] * 20, [(16, 0), (15, 3), (16, 9), (12, 1)] * 20]:
        with subtests.test("learns what drafts cost", steps=steps):
            times = with_drafts(steps)
            assert times.draft_s == pytest.approx(0.001, rel=0.1)
            batch = steps[0][0]
            assert times.decode_s(batch) == pytest.approx(0.010 + 0.002 * batch, rel=0.03)
            assert times.decode_s(batch, 10) == pytest.approx(0.020 + 0.002 * batch, rel=0.05)

    with subtests.test("what a sequence costs is not laid on its drafts"):
        # Its context is read once, whoever many drafts it has.
        steps = [(batch, drafts) for batch in (1, 2, 3, 4) for drafts in (0, 1, 4)] * 5
        times = with_drafts(steps, draft_s=0.0001, per_sequence_s=0.02)
        assert times.draft_s == pytest.approx(0.0001, rel=0.3)
        assert times.decode_s(8) == pytest.approx(0.17, rel=0.02)

    with subtests.test("before any drafts rows are alike and eight are fixed"):
        assert StepTimes().draft_s == 0.0
        assert learned([1] * 5, 0.008, 0.001).draft_s == pytest.approx(0.001)
        assert learned([16] * 5, 0.008, 0.001).draft_s == pytest.approx(0.001)

    with subtests.test("what drafts cost is kept while there are none or always as many"):
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

    with subtests.test("drafts count beside a prompt"):
        times = with_drafts([(4, 0), (4, 8)] * 20)
        for _ in range(20):
            times.note(4, 64, 0.018 + 0.008 + 0.064, 8)
        assert times.prompt_tokens_per_s == pytest.approx(1000, rel=0.05)
        assert times.chunk_tokens(4, 0.126, 512, 8) == pytest.approx(100, rel=0.1)
        assert times.chunk_tokens(4, 0.126, 512) == pytest.approx(108, rel=0.1)
