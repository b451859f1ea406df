"""The reserve for those that run, against living through every step."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.admitting import MAX_EXPECTED_TOKENS, Growing, Growth, OutputEstimate


def lived(sequences, page_size):
    """Each grows by a token a step; one that has nothing more to generate gives its own pages back."""
    taken, peak, left = 0, 0, [(seq, seq.num_pages, seq.num_pages) for seq in sequences if seq.more_tokens]
    for step in range(1, max((seq.more_tokens for seq in sequences), default=0) + 1):
        grown = [(seq, first, max(first, -(-(seq.num_tokens + step) // page_size))) for seq, first, _ in left]
        taken += sum(now for _, _, now in grown) - sum(before for _, _, before in left)
        peak = max(peak, taken)
        taken -= sum(seq.own_pages + now - first for seq, first, now in grown if seq.more_tokens == step)
        left = [(seq, first, now) for seq, first, now in grown if seq.more_tokens > step]
    return peak


@st.composite
def growing(draw, page_size):
    tokens = draw(st.integers(1, 20))
    pages = -(-tokens // page_size) + draw(st.integers(0, 1))
    return Growing(tokens, pages, draw(st.integers(0, pages)), draw(st.integers(0, 15)))


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_the_reserve_is_what_living_through_it_takes(data, page_size):
    sequences = data.draw(st.lists(growing(page_size), max_size=6))
    assert Growth(sequences, page_size).peak == lived(sequences, page_size)


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_a_newcomer_changes_it_as_if_it_had_been_there(data, page_size):
    sequences = data.draw(st.lists(growing(page_size), max_size=6))
    newcomer = data.draw(growing(page_size))
    assert Growth(sequences, page_size).peak_with(newcomer) == lived([*sequences, newcomer], page_size)


def test_what_is_kept_back(subtests):
    with subtests.test("those that end make room for the others"):
        short, long = Growing(4, 4, 4, 2), Growing(4, 4, 4, 4)
        assert Growth([short], 1).peak == 2
        assert Growth([long], 1).peak == 4
        assert Growth([short, long], 1).peak == Growth([short], 1).peak_with(long) == 4

    with subtests.test("the estimate follows those that end and is lifted by a retraction"):
        estimate = OutputEstimate(0.5)
        assert estimate.more_tokens(100) == 50
        for _ in range(100):
            estimate.ended(generated=20, allowed=100)
        assert estimate.more_tokens(100) == 20
        estimate.retracted()
        assert estimate.more_tokens(100) == 60

    with subtests.test("what is kept back for one is bounded"):
        estimate = OutputEstimate(1.0)
        assert estimate.more_tokens(10**6) == MAX_EXPECTED_TOKENS
        for _ in range(500):
            estimate.ended(generated=1, allowed=10**6)
        assert 0 < estimate.more_tokens(10**6) < MAX_EXPECTED_TOKENS / 5
