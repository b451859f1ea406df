from hypothesis import given
from hypothesis import strategies as st

from services.kv.block_hash import SCHEME, extend_hash, scope_seed, sequence_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SHORT_TEXTS = st.tuples(*[st.text("ab/", max_size=3)] * 2)


def test_golden_vectors_of_the_scheme():
    """Other processes hold these names: if they change, SCHEME must change."""
    assert SCHEME == "xxh3-64/1"
    assert scope_seed("m") == 0xF3AC56784A2440D9
    assert scope_seed("meta-llama/Llama-3.1-8B", "tenant-a") == 0x10576DABA99154EC
    assert sequence_hashes(range(12), 4, seed=0) == [
        0xA1D0BD893C9531AC,
        0xDB33494FF9C294FF,
        0xEB92E7B6E955EEE4,
    ]
    assert sequence_hashes([0, 1, 2**32 - 1, 151935] * 2, 4, scope_seed("m")) == [
        0x0F700B716AFE212C,
        0xD6F5A3CA31ABBE8C,
    ]


@given(TOKENS, st.integers(1, 7), st.integers(0, 2**64 - 1))
def test_one_hash_per_full_block_each_extending_the_last(token_ids, index_block, seed):
    hashes, parent = [], None
    for end in range(index_block, len(token_ids) + 1, index_block):
        parent = extend_hash(parent, token_ids[end - index_block : end], seed)
        hashes.append(parent)
    assert sequence_hashes(token_ids, index_block, seed) == hashes
    assert sequence_hashes(tuple(token_ids), index_block, seed) == hashes


def test_a_hash_names_all_that_comes_before():
    first, second = sequence_hashes([1, 2, 3, 4], 2, 0), sequence_hashes([9, 2, 3, 4], 2, 0)
    assert first[1] != second[1]
    assert sequence_hashes([1, 2], 2, seed=1) != sequence_hashes([1, 2], 2, seed=2)


@given(SHORT_TEXTS, SHORT_TEXTS)
def test_scopes_do_not_collide_by_concatenation(one, other):
    assert (scope_seed(*one) == scope_seed(*other)) == (one == other)
