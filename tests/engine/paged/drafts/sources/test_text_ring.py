"""These tests show what the texts of a salt went on with: against every place of every text."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.draft_sources import LONGEST, Trail
from services.engine.paged.shared_ngrams import TextRing

IDS = st.integers(0, 3)
TEXTS = st.lists(st.lists(IDS, max_size=12), max_size=3)


def common(ids, text, at):
    most = min(LONGEST, at, len(ids))
    return next((n for n in range(most) if text[at - 1 - n] != ids[-1 - n]), most)


def ring_of(texts, **room):
    ring = TextRing(**room)
    for text in texts:
        ring.add(text)
    return ring


def ids_after(texts, ids, most=3, **room):
    found = ring_of(texts, **room).match(ids, Trail(), most)
    return list(found[0].ids) if found else None


@given(texts=TEXTS, ids=st.lists(IDS, max_size=12))
def test_it_is_what_mostly_followed_where_most_of_the_end_stood(texts, ids):
    places = [(common(ids, text, at), text, at) for text in texts for at in range(len(text) + 1)]
    longest = max((length for length, _, _ in places), default=0)
    following = [text[at] for length, text, at in places if length == longest and at < len(text)]
    found = ring_of(texts, min_ids=64).match(ids, Trail(), 3)
    if longest < 3 or not following:
        assert found is None
    elif len([1 for length, _, _ in places if length >= 3]) <= 8:  # more are not compared
        match, _ = found
        assert match.length == longest
        assert following.count(match.ids[0]) == max(map(following.count, following))


@given(
    texts=st.lists(st.lists(IDS, max_size=40), max_size=40),
    ids=st.lists(IDS, min_size=3, max_size=12),
    trail=st.builds(Trail, st.integers(0, 12), st.integers(0, 2000)),
)
def test_nothing_is_made_up_of_two_texts_however_often_the_ring_went_round(texts, ids, trail):
    ring = ring_of(texts, min_ids=32, max_ids=128)
    assert ring.size_bytes <= 20 * 128
    found = ring.match(ids, trail, 4)
    if found is not None:
        match, _ = found
        said = [*ids[-match.length :], *match.ids]
        kept = [text[-32:] for text in texts]
        assert any(text[at : at + len(said)] == said for text in kept for at in range(len(text)))


def test_which_text_is_followed(subtests):
    with subtests.test("the majority decides and of as many the latest"):
        texts = [[1, 2, 3, 4, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 7], [1, 2, 3, 8, 8]]
        assert ids_after(texts, [1, 2, 3]) == [5, 7]
        assert ids_after([[0, 1, 2, 3, 9], *texts], [0, 1, 2, 3]) == [9]  # which has more in common

    with subtests.test("the oldest go"):
        old, new = [[7, 8, 9, 10]], [[number] * 30 for number in range(40, 44)]
        assert ids_after([*old, *new[:3]], [7, 8, 9], min_ids=32, max_ids=128) == [10]
        assert ids_after([*old, *new], [7, 8, 9], min_ids=32, max_ids=128) is None

    with subtests.test("what is found on a trail need not be searched"):
        text = [*range(40)]
        ring = ring_of([text, [*range(20), 99, 98, 97]])
        _, trail = ring.match(text[:18], Trail(), 2)
        assert list(ring.match(text[:20], trail, 2)[0].ids) == [99, 98]
        assert list(ring.match(text[:20], Trail(10, 10), 2)[0].ids) == [20, 21]  # who followed the first
        assert list(ring.match(text[:22], trail, 2)[0].ids) == [22, 23]  # where the other one parted

    with subtests.test("a text in overlapping pieces is followed from one into the next"):
        text = [*range(200)]
        ring = ring_of([text[:100], text[100 - LONGEST - 4 :]])
        trail, guesses = Trail(), []
        for end in range(20, 196):
            match, trail = ring.match(text[:end], trail, 4)
            guesses.append(list(match.ids) == text[end : end + 4])
        assert all(guesses)
