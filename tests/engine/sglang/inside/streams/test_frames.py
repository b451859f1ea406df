"""SGLang's frames survive the way through our messages; what cannot be right is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sglang.frames import metadata, registration
from services.engine.sglang.inside import frames
from services.engine.sglang.inside.frames import ReturnAddress
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


def test_registrations(subtests):
    for changed in [{}, {"f7": b"state", "f14": b"staging!", "f23": b"lens", "f21": b"2"}]:
        with subtests.test(changed=changed):
            sent = registration(**changed)
            memory, metadata_, num_pages = frames.memory_of_registration(sent)
            hello = handshake_pb2.Hello(agent_metadata=metadata_, engine_memory=memory)
            hello.memory.num_pages = num_pages
            received = handshake_pb2.Hello.FromString(hello.SerializeToString())
            assert frames.registration_frames(received, BACK) == addressed(sent, 2, 3)
            assert [region.kind for region in memory.kv] == ["DRAM", "DRAM", "VRAM", "VRAM"]
            assert (memory.agent_name, memory.tp_size, memory.engine_rank, num_pages) == (
                "agent-uuid",
                2,
                1,
                513,
            )
    for broken in [
        registration()[:-1],
        registration(f0=b"17"),
        registration(f5=b"123"),
        registration(f17=b"DRAM"),
        registration(f8=b"gpu"),
    ]:
        with subtests.test(broken=broken), pytest.raises(ProtocolError):
            frames.memory_of_registration(broken)
    for change in ["no memory", "kind", "opaque"]:
        with subtests.test(change=change):
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
    transfer_id=st.integers(1, 2**62),
    prefix=st.integers(0, 10**6),
    required=st.integers(1, 8),
    state=st.binary(max_size=20),
    aux=st.sampled_from([b"0", b"17", b"None"]),
)
def test_metadata_survive(pages, transfer_id, prefix, required, state, aux):
    sent = metadata(transfer_id, pages, aux, required, state, prefix)
    ticket = frames.ticket_of_metadata(sent, prompt_len=prefix + 1)
    received = handshake_pb2.KvTicket.FromString(ticket.SerializeToString())
    assert frames.metadata_frames(received, "agent-uuid", BACK) == addressed(sent, 2, 3)
    assert (received.decode_prefix_len, received.prompt_len) == (prefix, prefix + 1)
    assert frames.indices_of_runs(received.runs) == pages


def test_tickets_of_pages_and_without(subtests):
    with subtests.test("pages in a row are one run in token order"):
        runs = frames.runs_of_indices([5, 6, 7, 3, 4, 9, 8])
        assert [(run.first_page, run.num_pages) for run in runs] == [(5, 3), (3, 2), (9, 1), (8, 1)]
    for dummy in [b"0", b"1"]:
        with subtests.test(dummy=dummy):
            sent = metadata(prefix=64, dummy=dummy)
            ticket = frames.ticket_of_metadata(sent, prompt_len=64)
            assert ticket.no_pages is (dummy == b"1")
            assert not ticket.runs
            assert frames.metadata_frames(ticket, "agent-uuid", BACK) == addressed(sent, 2, 3)
    for transfer_id in [0, 2**63]:
        with subtests.test(transfer_id=transfer_id), pytest.raises(ProtocolError):
            frames.metadata_frames(handshake_pb2.KvTicket(room=transfer_id), "agent", BACK)


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


def test_targets_of_tails_and_states(subtests):
    with subtests.test("where tails and states go is in the ticket"):
        # A tail of 31 tokens before token 100 begins with the page of token 64; SGLang has a part of pages
        # between the two.
        window, state = targets_of(packed([7, 8, 3], [1, 2, 3, 4], [5]))
        assert (window.group, window.start_token) == (1, 64)
        assert [(run.first_page, run.num_pages) for run in window.runs] == [(7, 2), (3, 1)]
        assert (state.group, state.start_token) == (2, 100)
        assert [(run.first_page, run.num_pages) for run in state.runs] == [(5, 1)]
    for state, said in [
        (packed([7, 8], [], [5]), "takes 3 pages, the ticket's target has 2"),
        (packed([7, 8, 3], [], []), "takes 1 slots, the ticket's target has 0"),
        (packed([7, 8, 3]), "where 1 of its states go, and has 3"),
        (b"", "where 0 of its states go"),
        (packed([7, 8, 3], [], [5])[:-1], "not made of numbers"),
        (packed([7, 8, 3], [], [5]) + b"1234", "lists of indices"),
        (b"\xff\xff\xff\x7f", "lists of indices"),
    ]:
        with subtests.test(state=state, said=said), pytest.raises(ProtocolError, match=said):
            targets_of(state)


def test_last_words_and_aborts(subtests):
    for poll in [0, 4]:
        with subtests.test(poll=poll):
            sent = [b"KV_STATUS", b"99", str(poll).encode(), b"3", "der Knoten ist weg ✗".encode()]
            message = frames.message_of_prefill(sent)
            received = handshake_pb2.HandshakeMessage.FromString(message.SerializeToString())
            assert frames.status_frames(received.status, writer_rank=3) == sent
    with subtests.test("a refused ticket is a failure to sglang"):
        refused = handshake_pb2.Status(room=99, state=handshake_pb2.Status.STATE_REFUSED, reason="why")
        assert frames.status_frames(refused, 0) == [b"KV_STATUS", b"99", b"0", b"0", b"why"]
    with subtests.test("a status that is no last word is refused"):
        with pytest.raises(ProtocolError):
            frames.message_of_prefill([b"KV_STATUS", b"99", b"2", b"0", b""])
        with pytest.raises(ProtocolError):
            frames.message_of_prefill([b"STAGING_REQ", b"99"])
    for generation in [None, 12]:
        with subtests.test(generation=generation):
            sent = [b"ABORT", b"99", b"10.0.0.1", b"41234"]
            if generation is not None:
                sent.append(str(generation).encode())
            message = frames.message_of_decode(sent, prompt_len=0)
            assert frames.abort_frames(message.abort, BACK) == addressed(sent, 2, 3)
    with subtests.test("an ack survives with its generation"):
        sent = [b"ABORT_ACK", b"99", b"2", b"12"]
        message = frames.message_of_prefill(sent)
        assert frames.abort_ack_frames(message.abort_ack, writer_rank=2) == sent
