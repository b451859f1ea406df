from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.engine.torch.model.check_trial import plan_trial


@given(
    page_size=st.sampled_from([1, 4, 16, 64, 256]),
    window=st.integers(0, 5000),
    most_tokens=st.sampled_from([320, 1400]),
)
def test_what_a_trial_has_to_have(page_size, window, most_tokens):
    trial = plan_trial(page_size, window, most_tokens)
    a, again = trial.together["a"], trial.again
    chunks = list(a.chunks())
    assert trial.border % page_size == 0
    assert chunks[trial.step_after_border].start == trial.border
    assert min(map(len, chunks)) > 3  # chunks alone, and none that goes one by one
    assert any(len(chunk) > 1 and chunk.start for chunk in chunks)  # several tokens after a state
    assert any(chunk.start % 64 for chunk in chunks)
    assert again.end == a.end  # it has a's tokens
    assert a.end <= max(window + 41, trial.border + 73)
    assert a.end > window or a.end >= most_tokens
    assert trial.together["whole"].lengths[0] > 256
    lengths = trial.together["mixed"].lengths
    assert lengths[0] == 1
    assert any(before == 1 < after for before, after in pairwise(lengths))
    assert trial.together["second"].first_step > trial.together["first"].last_step
    assert sum(each.at(1) is not None for each in trial.together.values()) >= 3  # packed
