import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.chat_memory import ConversationMemory, drift_tokens

ids = st.lists(st.integers(0, 3), max_size=20)


@given(ids, ids, ids)
def test_drift_is_what_the_prompt_does_not_begin_with(
    shared: list[int], last: list[int], new: list[int]
) -> None:
    remembered, prompt = shared + last, shared + new
    matching = 0
    while matching < min(len(remembered), len(prompt)) and remembered[matching] == prompt[matching]:
        matching += 1
    assert drift_tokens(tuple(remembered), prompt) == len(remembered) - matching


@given(
    turns=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6)), max_size=30),
    max_conversations=st.integers(1, 4),
    max_token_ids=st.integers(1, 12),
)
def test_no_more_is_remembered_than_may_be(
    turns: list[tuple[str, int]], max_conversations: int, max_token_ids: int
) -> None:
    memory, oracle = ConversationMemory(max_conversations, max_token_ids), dict[str, int]()
    for name, length in turns:
        memory.remember("t", name, [1] * length)
        oracle.pop(name, None)
        if length <= max_token_ids:
            oracle[name] = length
        while len(oracle) > max_conversations or sum(oracle.values()) > max_token_ids:
            del oracle[next(iter(oracle))]
    assert {name: len(memory.recall("t", name) or ()) for name in oracle} == oracle
    assert len(memory) == len(oracle)


def test_the_least_recently_used_conversation_is_forgotten() -> None:
    memory = ConversationMemory(2, 100)
    memory.remember("t", "a", [1, 2])
    memory.remember("t", "b", [3])
    assert list(memory.recall("t", "a") or ()) == [1, 2]
    memory.remember("t", "c", [4])
    assert memory.recall("t", "b") is None
    memory.remember("t", "a", [1, 2, 5])
    memory.remember("t", "d", [6])
    assert memory.recall("t", "c") is None
    assert list(memory.recall("t", "a") or ()) == [1, 2, 5]
    assert len(memory) == 2

    memory = ConversationMemory(10, 10)
    for name in "abc":
        memory.remember("t", name, [1] * 3)
    memory.recall("t", "a")
    memory.remember("t", "d", [1] * 3)
    assert [memory.recall("t", name) is not None for name in "abcd"] == [True, False, True, True]
    memory.remember("t", "d", [1] * 4)  # instead of the three
    assert len(memory) == 3
    memory.remember("t", "e", [1] * 10)
    assert (len(memory), len(memory.recall("t", "e") or ())) == (1, 10)
    memory.remember("t", "e", [1] * 11)
    assert len(memory) == 0
    memory.remember("t", "f", [1] * 10)
    assert memory.recall("t", "f") is not None

    memory = ConversationMemory(1, 100)
    memory.remember("t", "a", [1, 2, 3])
    remembered = memory.recall("t", "a")
    assert remembered is not None
    assert drift_tokens(remembered, [1, 2, 4, 5]) == 1

    with pytest.raises(ValueError, match="max_entries"):
        ConversationMemory(0, 100)
