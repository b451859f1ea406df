"""Chains find every place where three ids stood, latest first: against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.draft_sources import NgramChains

# Few ids, so that they meet again; texts of more than 64 are sorted by numpy.
TEXTS = st.lists(
    st.lists(st.integers(0, 3), max_size=6) | st.lists(st.integers(0, 3), min_size=65, max_size=90),
    max_size=6,
)


def places(ids, three, oldest=0):
    return [at for at in reversed(range(max(3, oldest), len(ids))) if ids[at - 3 : at] == three]


def found(chains, ids, three):
    return [at for at in chains.walk(*three) if at >= 3 and ids[at - 3 : at] == three]


@given(texts=TEXTS, three=st.lists(st.integers(0, 3), min_size=3, max_size=3), heads=st.sampled_from([1, 64]))
def test_whatever_it_is_added_by_all_is_found(texts, three, heads):
    chains, ids = NgramChains(heads), []
    for text in texts:
        chains.add(text)
        ids += text
    assert chains.end == len(ids)
    assert found(chains, ids, three) == places(ids, three)


@given(
    text=st.lists(st.integers(0, 2), max_size=300), three=st.lists(st.integers(0, 2), min_size=3, max_size=3)
)
def test_only_the_last_are_kept(text, three):
    chains = NgramChains(16, num_kept=64)
    for first in range(0, len(text), 16):
        chains.add(text[first : first + 16])
    assert found(chains, text, three) == places(text, three, oldest=len(text) - 64)
    assert chains.size_bytes == 8 * (16 + 64)


@given(
    text=st.lists(st.integers(0, 2), max_size=300), three=st.lists(st.integers(0, 2), min_size=3, max_size=3)
)
def test_doubled_they_find_what_they_found_and_what_comes(text, three):
    chains = NgramChains(16, num_kept=16)
    for first in range(0, len(text), 16):
        if first in (16, 32, 64, 128, 256):
            chains.double()
        chains.add(text[first : first + 16])
    assert found(chains, text, three) == places(text, three)


def test_ids_of_the_largest_vocabularies_stay_within_64_bits():
    ids = [2**31 - 1, 2**31 - 2, 2**31 - 3, 7]
    chains = NgramChains(64)
    chains.add(ids * 20)
    assert found(chains, ids * 20, ids[:3]) == places(ids * 20, ids[:3])
    chains.add(ids)
    assert next(chains.walk(*ids[:3])) == 83
