"""Where ranks will soon be able to go on: against a list of all guesses."""

from hypothesis import given
from hypothesis import strategies as st

from router.ranks.observed import D0, D1, P0, hashes
from services.router.ranks import resume_guesses as resume_guesses_module
from services.router.ranks.resume_guesses import ResumeGuesses

RANKS = [D0, D1, P0]
BLOCKS = hashes(*range(1, 8))
guesses = st.tuples(st.sampled_from(RANKS), st.sampled_from(BLOCKS), st.floats(0.1, 10), st.floats(0, 3))


@given(st.lists(guesses, max_size=20), st.integers(0, 7), st.none() | st.sampled_from(RANKS))
def test_the_deepest_is_that_of_the_guesses_that_have_not_ended(told, most, forgotten):
    known, live, now = ResumeGuesses(), [], 0.0
    for index, (rank, block, ttl_s, passed_s) in enumerate(told):
        now += passed_s
        known.add(rank, block, now, ttl_s)
        live.append((rank, block, now + ttl_s))
        if forgotten is not None and index == len(told) // 2:
            known.forget(forgotten)
            live = [guess for guess in live if guess[0] != forgotten]
    depths = {
        rank: [
            BLOCKS.index(block) + 1 for of_rank, block, until_s in live if of_rank == rank and until_s > now
        ]
        for rank in RANKS
    }
    expected = {rank: max((d for d in found if d <= most), default=0) for rank, found in depths.items()}
    found = known.deepest(BLOCKS, dict.fromkeys(RANKS, most), now)
    assert found == {rank: depth for rank, depth in expected.items() if depth}
    along = {depth: ranks for depth, ranks in known.along(BLOCKS, now)}
    assert along == {
        depth: {rank for rank in RANKS if depth in depths[rank]}
        for depth in range(1, 8)
        if any(depth in of_rank for of_rank in depths.values())
    }
    known.add(D0, BLOCKS[0], now + 100, 0.0)
    assert known._until_s == {} and known._ends == [] and not len(known._points)


def test_of_too_many_those_that_end_first_go(monkeypatch):
    monkeypatch.setattr(resume_guesses_module, "_MAX_GUESSES", 2)
    known = ResumeGuesses()
    for block, ttl_s in zip(BLOCKS[:3], (5.0, 1.0, 3.0), strict=True):
        known.add(D0, block, 0.0, ttl_s)
    assert [depth for depth, _ in known.along(BLOCKS, 0.5)] == [3, 1]
