import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.dialects.responses.store import ResponseStore, Stored
from services.values.errors import NotFound
from services.wire.isthmus.v1.generation_pb2 import ChatMessage


def stored(size_bytes: int, previous_id: str = "") -> Stored:
    return Stored(b"x" * size_bytes, (), previous_id, "c")


def test_turns_of_a_chain_come_oldest_first() -> None:
    store = ResponseStore(10, 1000)
    previous = ""
    for text in ("a", "b", "c"):
        turns = tuple(ChatMessage(role="user", content=text + end).SerializeToString() for end in "12")
        store.put("t", text, Stored(b"{}", turns, previous, "a"))
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


_TENANTS = st.sampled_from(["", "t"])
_OPS = st.one_of(
    st.tuples(st.just("put"), _TENANTS, st.uuids().map(str), st.integers(0, 12)),
    st.tuples(st.just("get"), _TENANTS, st.integers(0, 20), st.just(0)),
    st.tuples(st.just("delete"), _TENANTS, st.integers(0, 20), st.just(0)),
)


@given(st.lists(_OPS, max_size=30))
def test_it_holds_the_latest_used_of_each_tenant(ops: list[tuple[str, str, object, int]]) -> None:
    """Against a list, the least recently used first."""
    store, known, ids = ResponseStore(4, 20), [], []
    for verb, tenant, which, size_bytes in ops:
        if verb == "put":
            ids.append(which)
            store.put(tenant, str(which), stored(size_bytes))
            known.append(((tenant, which), size_bytes))
            while len(known) > 4 or sum(size for _, size in known) > 20:
                known.pop(0)
            continue
        response_id = ids[int(str(which)) % len(ids)] if ids else "none"
        entry = next((entry for entry in known if entry[0] == (tenant, response_id)), None)
        act = store.get if verb == "get" else store.delete
        if entry is None:
            with pytest.raises(NotFound):
                act(tenant, str(response_id))
            continue
        act(tenant, str(response_id))
        known.remove(entry)
        if verb == "get":
            known.append(entry)
    assert repr(store) == f"ResponseStore({len(known)} responses, {sum(size for _, size in known)} bytes)"


def test_what_is_larger_than_all_the_room_leaves_the_others_alone() -> None:
    store = ResponseStore(4, 20)
    store.put("", "a", stored(20))
    store.put("", "b", stored(21))
    assert store.get("", "a").size_bytes == 20
    with pytest.raises(NotFound):
        store.get("", "b")
