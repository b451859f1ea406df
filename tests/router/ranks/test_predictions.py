"""These tests show what ranks will soon hold: case by case, and against a list of all guesses."""

from hypothesis import given
from hypothesis import strategies as st

from router.ranks.observed import D0, D1, P0, hashes, known, predicted
from services.index.read.prefix_index import deepest
from services.router.ranks import predictions as predictions_module
from services.router.ranks.predictions import Predictions
from services.values.kv import BlockHash
from services.values.rank import RankKey

RANKS = [RankKey("decode", index) for index in range(3)]
# Sequences of three conversations that share their first blocks.
SEQUENCES = [
    [BlockHash(n) for n in numbers]
    for numbers in ([1, 2, 3, 4, 5], [1, 2, 30, 40], [1, 200, 300, 400, 500, 600])
]

sequences = st.builds(lambda s, n: s[:n], st.sampled_from(SEQUENCES), st.integers(0, 6))
guesses = st.tuples(st.sampled_from(RANKS), sequences, st.floats(0.1, 10), st.floats(0, 3))


@given(st.lists(guesses, max_size=15), sequences, st.none() | st.sampled_from(RANKS))
def test_matches_are_those_of_the_guesses_that_have_not_ended(guesses, asked, forgotten):
    predictions, now = Predictions(), 0.0
    live: list[tuple[RankKey, list[BlockHash], float]] = []
    for rank, blocks, ttl_s, passed_s in guesses:
        now += passed_s
        predictions.add(rank, blocks, now, ttl_s)
        live.append((rank, blocks, now + ttl_s))
    if forgotten is not None:
        predictions.forget(forgotten)
        live = [guess for guess in live if guess[0] != forgotten]

    runs = list(predictions._runs.values())
    assert all(run.num_blocks == runs.count(run) for run in runs)

    def expected(rank: RankKey) -> int:
        held = {b for of_rank, blocks, until in live if of_rank == rank and until > now for b in blocks}
        return next((depth for depth, block in enumerate(asked) if block not in held), len(asked))

    depths = {rank: expected(rank) for rank in RANKS}
    assert {rank: predictions.of(asked, now).depth(rank) for rank in RANKS} == depths
    deepest = max(depths.values())
    assert set(predictions.of(asked, now).deepest()) == {r for r in RANKS if deepest and depths[r] == deepest}


def test_nothing_is_left_of_what_has_ended():
    predictions = Predictions()
    for index in range(100):
        predictions.add(RANKS[index % 3], SEQUENCES[index % 3], float(index), 1.0, resumable=index % 5)
    predictions.add(RANKS[0], [], 1_000.0, 1.0)
    assert not predictions._runs and not predictions._resumable
    assert predictions._num_blocks == 0


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.lists(st.integers(1, 5), max_size=5), st.floats(0, 9))))
def test_guesses_that_contradict_each_other_only_guess_wrongly(guesses):
    """No hash has two blocks before it, but another router may say so."""
    predictions = Predictions()
    for now, (rank, numbers, ttl_s) in enumerate(guesses):
        blocks = [BlockHash(number) for number in numbers]
        predictions.add(rank, blocks, float(now), ttl_s, resumable=len(blocks))
        assert 0 <= predictions.of(blocks, float(now)).depth(rank) <= len(blocks)
    for rank in RANKS:
        predictions.forget(rank)
    assert not predictions._guesses and predictions._num_blocks == 0


def test_a_prompt_that_is_guessed_again_a_turn_longer_costs_its_new_blocks(monkeypatch):
    predictions, looked_up = Predictions(), []

    class Noted(dict):
        def get(self, block, otherwise=None):
            looked_up.append(block)
            return super().get(block, otherwise)

    predictions._runs = Noted()
    blocks = [BlockHash(n) for n in range(2_000)]
    for turn in range(10):
        looked_up.clear()
        predictions.add(RANKS[0], blocks[: 1_000 + 100 * turn], float(turn), 20.0)
        predictions.add(RANKS[1], blocks[: 1_000 + 100 * turn], turn + 0.5, 20.0)
        assert len(looked_up) < 100
    assert [predictions.of(blocks, 12.0).depth(rank) for rank in RANKS] == [1_900, 1_900, 0]
    assert predictions.of(blocks, 28.5).depth(RANKS[0]) == 1_900  # the last guess alone has not ended
    predictions.add(RANKS[2], blocks[:500], 40.0, 1.0)  # all others have
    assert len(predictions._runs) == 500


def test_the_turns_of_a_conversation_are_one_run_again():
    """Of two ranks, each guessed for longer than the next turn takes."""
    predictions, blocks = Predictions(), [BlockHash(n) for n in range(40)]
    for turn in range(100):
        blocks += [BlockHash(n) for n in range(1_000 * turn + 100, 1_000 * turn + 104)]
        for after_s, rank in enumerate(RANKS[:2]):
            predictions.add(rank, blocks, turn + 0.1 * after_s, 5.0)
    assert len(set(map(id, predictions._runs.values()))) == 1
    assert [predictions.of(blocks, 100.0).depth(rank) for rank in RANKS] == [440, 440, 0]
    # Another answer to the last question is nobody's, and the first rank's guesses end first.
    other = [*blocks[:-4], BlockHash(7_000_000)]
    assert [predictions.of(other, 104.05).depth(rank) for rank in RANKS] == [0, 436, 0]


def test_a_rank_is_forgotten_that_was_guessed_of_twice():
    predictions = Predictions()
    predictions.add(RANKS[0], SEQUENCES[0], 0.0, 1.0)
    predictions.add(RANKS[0], SEQUENCES[0], 0.5, 1.0)
    predictions.forget(RANKS[0])
    assert not predictions._runs and not predictions._resumable
    assert predictions._num_blocks == 0


def test_a_prediction_ends_with_the_last_of_its_guesses(subtests):
    with subtests.test("a prediction matches from the first block on"):
        clock, balance = known()
        balance.predict(D0, hashes(1, 2, 3))
        assert predicted(balance, D0, hashes(1, 2, 3, 4)) == 3
        assert predicted(balance, D0, hashes(1, 2)) == 2
        assert predicted(balance, D0, hashes(9, 2, 3)) == 0
        assert predicted(balance, D1, hashes(1)) == 0
    with subtests.test("a prediction ends"):
        clock, balance = known()
        balance.predict(D0, hashes(1, 2), ttl_s=5)
        clock.now += 3
        balance.predict(D0, hashes(1), ttl_s=5)
        clock.now += 2
        assert predicted(balance, D0, hashes(1, 2)) == 1
        clock.now += 3
        assert predicted(balance, D0, hashes(1, 2)) == 0
    with subtests.test("a renewed prediction outlives the first"):
        clock, balance = known()
        balance.predict(D0, hashes(1, 2), ttl_s=1)
        balance.predict(D0, hashes(1, 2), ttl_s=9)
        clock.now += 2
        balance.predict(D1, hashes(7))
        assert predicted(balance, D0, hashes(1, 2)) == 2
    with subtests.test("a shorter prediction does not cut a longer one"):
        clock, balance = known()
        balance.predict(D0, hashes(1, 2), ttl_s=9)
        balance.predict(D0, hashes(1), ttl_s=1)
        clock.now += 2
        balance.predict(D1, hashes(7))
        assert predicted(balance, D0, hashes(1, 2)) == 2


def test_predictions_are_bounded_oldest_out_first(balance, monkeypatch):
    monkeypatch.setattr(predictions_module, "_MAX_BLOCKS", 4)
    for index in range(3):
        balance.predict(RankKey("decode", index), hashes(1, 2))
    matched = [predicted(balance, RankKey("decode", index), hashes(1, 2)) for index in range(3)]
    assert matched == [0, 2, 2]
    balance.predict(D0, hashes(*range(10)))
    assert predicted(balance, D0, hashes(*range(10))) == 4


BLOCKS = hashes(*range(1, 8))
points = st.tuples(st.sampled_from([D0, D1, P0]), st.integers(1, 7), st.floats(0.1, 10), st.floats(0, 3))


@given(st.lists(points, max_size=20), st.integers(0, 7), st.none() | st.sampled_from([D0, D1, P0]))
def test_the_deepest_is_that_of_the_guesses_that_have_not_ended(told, most, forgotten):
    """Where ranks will soon be able to go on."""
    predictions, live, now = Predictions(), [], 0.0
    for index, (rank, depth, ttl_s, passed_s) in enumerate(told):
        now += passed_s
        predictions.add(rank, BLOCKS[:depth], now, ttl_s, resumable=depth)
        live.append((rank, depth, now + ttl_s))
        if forgotten is not None and index == len(told) // 2:
            predictions.forget(forgotten)
            live = [guess for guess in live if guess[0] != forgotten]
    depths = {
        rank: [depth for of_rank, depth, until_s in live if of_rank == rank and until_s > now]
        for rank in (D0, D1, P0)
    }
    expected = {rank: max((d for d in found if d <= most), default=0) for rank, found in depths.items()}
    guessed = predictions.of(BLOCKS, now)
    found = deepest(guessed.resumable(), dict.fromkeys(depths, most))
    assert found == {rank: depth for rank, depth in expected.items() if depth}
    assert dict(guessed.resumable()) == {
        depth: {rank for rank in depths if depth in depths[rank]}
        for depth in range(1, 8)
        if any(depth in of_rank for of_rank in depths.values())
    }
    predictions.add(D0, BLOCKS, now + 100, 0.0)
    assert not predictions._runs and not predictions._resumable and not predictions._guesses


def test_where_a_rank_can_go_on_is_guessed_of_any_block_and_for_its_own_time():
    predictions = Predictions()
    predictions.add(D0, BLOCKS, 0.0, 9.0, resumable=7)
    predictions.add(D0, BLOCKS, 0.0, 5.0, resumable=3)  # all blocks are guessed for longer already
    predictions.add(D0, BLOCKS[:5], 1.0, 5.0)
    assert list(predictions.of(BLOCKS, 4.0).resumable()) == [(7, {D0}), (3, {D0})]
    assert list(predictions.of(BLOCKS[:6], 4.0).resumable()) == [(3, {D0})]
    assert list(predictions.of(BLOCKS, 5.0).resumable()) == [(7, {D0})]


def test_of_too_many_guesses_the_oldest_goes_with_where_one_can_go_on(monkeypatch):
    monkeypatch.setattr(predictions_module, "_MAX_BLOCKS", 12)
    predictions = Predictions()
    for depth, ttl_s in ((7, 5.0), (6, 1.0), (4, 3.0)):
        predictions.add(RANKS[depth % 3], BLOCKS[:depth], 0.0, ttl_s, resumable=depth)
    assert [depth for depth, _ in predictions.of(BLOCKS, 0.5).resumable()] == [6, 4]
