import pytest

from services.router.dialects.responses_answer import KeptResponse, ResponseStore
from services.values.errors import NotFound
from services.wire.isthmus.v1.generation_pb2 import ChatMessage


def stored(size_bytes: int, previous_id: str = "") -> KeptResponse:
    return KeptResponse(b"x" * size_bytes, (), previous_id, "c")


def test_turns_of_a_chain_come_oldest_first() -> None:
    store = ResponseStore(10, 1000)
    previous = ""
    for text in ("a", "b", "c"):
        turns = tuple(ChatMessage(role="user", content=text + end).SerializeToString() for end in "12")
        store.put("t", text, KeptResponse(b"{}", turns, previous, "a"))
        previous = text
    assert [turn.content for turn in store.turns("t", "b")] == ["a1", "a2", "b1", "b2"]
    assert store.turns("t", "") == []
    store.delete("t", "a")
    with pytest.raises(NotFound, match="'a' is not known here"):
        store.turns("t", "c")  # never without its beginning


def test_a_chain_that_is_used_is_kept_whole() -> None:
    store = ResponseStore(3, 1000)
    store.put("", "a", stored(1))
    store.put("", "b", stored(1, "a"))
    store.put("", "other", stored(1))
    store.turns("", "b")
    store.put("", "newest", stored(1))
    with pytest.raises(NotFound):
        store.get("", "other")
    assert store.turns("", "b") == []


def test_one_tenants_writes_take_nothing_from_another_below_its_share() -> None:
    store = ResponseStore(10, 1000)
    for number in range(5):
        store.put("quiet", str(number), stored(100))
    for number in range(100):
        store.put("busy", str(number), stored(90))
    assert [store.get("quiet", str(number)).size_bytes for number in range(5)] == [100] * 5
    store.get("busy", "99")
    with pytest.raises(NotFound):
        store.get("busy", "94")


def test_what_is_larger_than_all_the_room_leaves_the_others_alone() -> None:
    store = ResponseStore(4, 20)
    store.put("", "a", stored(20))
    store.put("", "b", stored(21))
    assert store.get("", "a").size_bytes == 20
    with pytest.raises(NotFound):
        store.get("", "b")
