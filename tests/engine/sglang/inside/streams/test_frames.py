"""SGLang's frames survive the way through our messages; what cannot be right is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sglang.frames import metadata, registration
from services.engine.sglang.inside.streams import frames
from services.engine.sglang.inside.streams.frames import ReturnAddress
from services.values.errors import ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout
from services.wire.isthmus.v1 import handshake_pb2

BACK = ReturnAddress("isthmus", 7)


def addressed(expected, *places):
    """The frames with our return address in place of the socket's."""
    expected = list(expected)
    for place, value in zip(places, (b"isthmus", b"7"), strict=True):
        expected[place] = value
    return expected


@pytest.mark.parametrize("changed", [{}, {"f7": b"state", "f14": b"staging!", "f23": b"lens", "f21": b"2"}])
def test_a_registration_survives(changed):
    sent = registration(**changed)
    memory, metadata_, num_pages = frames.memory_of_registration(sent)
    hello = handshake_pb2.Hello(agent_metadata=metadata_, engine_memory=memory)
    hello.memory.num_pages = num_pages
    received = handshake_pb2.Hello.FromString(hello.SerializeToString())
    assert frames.registration_frames(received, BACK) == addressed(sent, 2, 3)
    assert [region.kind for region in memory.kv] == ["DRAM", "DRAM", "VRAM", "VRAM"]
    assert (memory.agent_name, memory.tp_size, memory.engine_rank, num_pages) == ("agent-uuid", 2, 1, 513)


@pytest.mark.parametrize(
    "broken",
    [
        registration()[:-1],
        registration(f0=b"17"),
        registration(f5=b"123"),
        registration(f17=b"DRAM"),
        registration(f8=b"gpu"),
    ],
)
def test_a_registration_that_is_not_understood_is_refused(broken):
    with pytest.raises(ProtocolError):
        frames.memory_of_registration(broken)


@pytest.mark.parametrize("change", ["no memory", "kind", "opaque"])
def test_a_hello_that_cannot_be_registered_is_refused(change):
    memory, metadata_, _ = frames.memory_of_registration(registration())
    hello = handshake_pb2.Hello(agent_metadata=metadata_, engine_memory=memory)
    if change == "no memory":
        hello.ClearField("engine_memory")
    elif change == "kind":
        hello.engine_memory.kv[0].kind = "FILE"
    else:
        hello.engine_memory.opaque[5] = b"somebody else's addresses"
    with pytest.raises(ProtocolError):
        frames.registration_frames(hello, BACK)


@given(
    pages=st.lists(st.integers(0, 2**31 - 1), max_size=40, unique=True),
    room=st.integers(1, 2**62),
    prefix=st.integers(0, 10**6),
    required=st.integers(1, 8),
    state=st.binary(max_size=20),
    aux=st.sampled_from([b"0", b"17", b"None"]),
)
def test_metadata_survive(pages, room, prefix, required, state, aux):
    sent = metadata(room, pages, aux, required, state, prefix)
    ticket = frames.ticket_of_metadata(sent, prompt_len=prefix + 1)
    received = handshake_pb2.KvTicket.FromString(ticket.SerializeToString())
    assert frames.metadata_frames(received, "agent-uuid", BACK) == addressed(sent, 2, 3)
    assert (received.decode_prefix_len, received.prompt_len) == (prefix, prefix + 1)
    assert frames.indices_of_runs(received.runs) == pages


def test_pages_in_a_row_are_one_run_in_token_order():
    runs = frames.runs_of_indices([5, 6, 7, 3, 4, 9, 8])
    assert [(run.first_page, run.num_pages) for run in runs] == [(5, 3), (3, 2), (9, 1), (8, 1)]


WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (0,), 2, 16, "float32", window=32, unit_bytes=100)
STATE = KvGroup(GroupKind.RECURRENT, (1,), 0, 0, "float32", unit_bytes=7000)
FULL = KvGroup(GroupKind.FULL_ATTENTION, (2,), 2, 16, "float32")
HYBRID = KvLayout(16, 4096, 7, groups=(FULL, WINDOW, STATE))


def packed(*lists):
    """As SGLang's pack_int_lists(lists, "i")."""
    parts = [struct.pack(f"<{len(each)}i", *each) for each in lists]
    return struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts)) + b"".join(parts)


def targets_of(state, prompt_len=100, places=(0, 2)):
    ticket = frames.ticket_of_metadata(metadata(9, (4, 5, 6), state=state), prompt_len)
    return frames.targets_of_state(ticket, HYBRID, places)


def test_where_tails_and_states_go_is_in_the_ticket():
    """A tail of 31 tokens before token 100 begins with the page of token 64; SGLang has a part of pages
    between the two."""
    window, state = targets_of(packed([7, 8, 3], [1, 2, 3, 4], [5]))
    assert (window.group, window.start_token) == (1, 64)
    assert [(run.first_page, run.num_pages) for run in window.runs] == [(7, 2), (3, 1)]
    assert (state.group, state.start_token) == (2, 100)
    assert [(run.first_page, run.num_pages) for run in state.runs] == [(5, 1)]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (packed([7, 8], [], [5]), "takes 3 pages, the ticket's target has 2"),
        (packed([7, 8, 3], [], []), "takes 1 slots, the ticket's target has 0"),
        (packed([7, 8, 3]), "where 1 of its states go, and has 3"),
        (b"", "where 0 of its states go"),
        (packed([7, 8, 3], [], [5])[:-1], "not made of numbers"),
        (packed([7, 8, 3], [], [5]) + b"1234", "lists of indices"),
        (b"\xff\xff\xff\x7f", "lists of indices"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(state, said):
    with pytest.raises(ProtocolError, match=said):
        targets_of(state)


@pytest.mark.parametrize("dummy", [b"0", b"1"])
def test_a_full_hit_and_a_dummy_are_told_apart(dummy):
    sent = metadata(prefix=64, dummy=dummy)
    ticket = frames.ticket_of_metadata(sent, prompt_len=64)
    assert ticket.no_pages is (dummy == b"1")
    assert not ticket.runs
    assert frames.metadata_frames(ticket, "agent-uuid", BACK) == addressed(sent, 2, 3)


@pytest.mark.parametrize("room", [0, 2**63])
def test_a_room_that_sglang_cannot_name_is_refused(room):
    with pytest.raises(ProtocolError):
        frames.metadata_frames(handshake_pb2.KvTicket(room=room), "agent", BACK)


@pytest.mark.parametrize("poll", [0, 4])
def test_a_last_word_survives(poll):
    sent = [b"KV_STATUS", b"99", str(poll).encode(), b"3", "der Knoten ist weg ✗".encode()]
    message = frames.message_of_prefill(sent)
    received = handshake_pb2.HandshakeMessage.FromString(message.SerializeToString())
    assert frames.status_frames(received.status, writer_rank=3) == sent


def test_a_refused_ticket_is_a_failure_to_sglang():
    refused = handshake_pb2.Status(room=99, state=handshake_pb2.Status.STATE_REFUSED, reason="why")
    assert frames.status_frames(refused, 0) == [b"KV_STATUS", b"99", b"0", b"0", b"why"]


def test_a_status_that_is_no_last_word_is_refused():
    with pytest.raises(ProtocolError):
        frames.message_of_prefill([b"KV_STATUS", b"99", b"2", b"0", b""])
    with pytest.raises(ProtocolError):
        frames.message_of_prefill([b"STAGING_REQ", b"99"])


@pytest.mark.parametrize("generation", [None, 12])
def test_an_abort_survives(generation):
    sent = [b"ABORT", b"99", b"10.0.0.1", b"41234"]
    if generation is not None:
        sent.append(str(generation).encode())
    message = frames.message_of_decode(sent, prompt_len=0)
    assert frames.abort_frames(message.abort, BACK) == addressed(sent, 2, 3)


def test_an_ack_survives_with_its_generation():
    sent = [b"ABORT_ACK", b"99", b"2", b"12"]
    message = frames.message_of_prefill(sent)
    assert frames.abort_ack_frames(message.abort_ack, writer_rank=2) == sent
