"""This module converts SGLang's NIXL control messages (frames of bytes) to our Handshake and back.

It is pure.

    decode's scheduler                                        prefill's scheduler
    registration frames --> Hello.engine_memory ~~ stream ~~> registration frames
    metadata frames ------> KvTicket ------------ stream ---> metadata frames
    abort frames ---------> Abort --------------- stream ---> abort frames
    status frames <-------- Status <------------- stream ---- status frames
    ack frames <----------- AbortAck <----------- stream ---- ack frames

The frames are those of SGLang 0.5.23, disaggregation/nixl/conn.py and common/conn.py; integers are ASCII
unless packed. Where SGLang puts its own socket's address into a frame for the answer, the receiving side puts
the number of the stream on which the message came (`ReturnAddress`).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.kv.ticket import targets_of
from services.kv.transfer_plan import pages_of, runs_of
from services.values.errors import ProtocolError
from services.values.kv import KvLayout, PageId
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2

Frames = list[bytes]

GUARD = b"NixlMsgGuard"
REGISTRATION = b"None"
_ABORT = b"ABORT"
_ABORT_ACK = b"ABORT_ACK"
_STATUS = b"KV_STATUS"

# These are the values of sglang.srt.disaggregation.base.conn.KVPoll.
POLL_FAILED = 0
POLL_SUCCESS = 4

_NUM_REGISTRATION_FRAMES = 25  # The guard is one of them.
# Only SGLang itself reads these frames of the registration, counted without the guard.
_OPAQUE = (7, 12, 13, 14, 15, 19, 21, 22, 23)
_MAX_TRANSFER_ID = 1 << 63


@dataclass(frozen=True, slots=True)
class ReturnAddress:
    """This represents a stream where SGLang expects the address of a socket."""

    host: str
    port: int  # This is the stream's number, and also chooses SGLang's transfer queue.

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"


# A registration has the addresses of a decode process's memory.


def memory_of_registration(frames: Frames) -> tuple[handshake_pb2.EngineMemory, bytes, int]:
    """Return the memory, the NIXL agent's metadata and the number of page slots. Raises ProtocolError."""
    if len(frames) != _NUM_REGISTRATION_FRAMES or frames[0] != GUARD or frames[1] != REGISTRATION:
        raise ProtocolError(f"not a registration as SGLang 0.5.23 writes it: {len(frames)} frames")
    body = frames[1:]
    addresses, item_bytes = _unpack("Q", body[5]), _unpack("Q", body[18])
    kinds = body[17].decode("ascii").split(",") if body[17] else []
    if not len(addresses) == len(item_bytes) == len(kinds):
        raise ProtocolError("SGLang registers addresses, sizes and kinds of different number")
    memory = handshake_pb2.EngineMemory(
        agent_name=body[3].decode("ascii"),
        kv=[
            handshake_pb2.MemoryRegion(address=address, page_bytes=size, kind=kind)
            for address, size, kind in zip(addresses, item_bytes, kinds, strict=True)
        ],
        kv_layer_ids=_unpack("I", body[20]),
        aux_addresses=_unpack("Q", body[6]),
        device_id=_number(body[8]),
        tp_size=_number(body[9]),
        engine_rank=_number(body[10]),
        opaque={index: body[index] for index in _OPAQUE if body[index]},
    )
    return memory, body[4], _number(body[16])


def registration_frames(hello: handshake_pb2.Hello, back: ReturnAddress) -> Frames:
    """Return the frames.

    Raises ProtocolError where a decode process's Hello lacks the addresses of its memory.
    """
    if not hello.HasField("engine_memory") or not hello.engine_memory.agent_name:
        raise ProtocolError("the decode rank's Hello has no engine_memory: its engine is another one")
    memory = hello.engine_memory
    for region in memory.kv:
        if region.kind not in ("DRAM", "VRAM"):
            raise ProtocolError(f"engine_memory.kv.kind must be DRAM or VRAM, got {region.kind!r}")
    sizes = [region.page_bytes for region in memory.kv]
    body = [b""] * (_NUM_REGISTRATION_FRAMES - 1)
    body[0] = REGISTRATION
    body[1], body[2] = back.host.encode("ascii"), _ascii(back.port)
    body[3], body[4] = memory.agent_name.encode("ascii"), hello.agent_metadata
    body[5] = _pack("Q", [region.address for region in memory.kv])
    body[6] = _pack("Q", memory.aux_addresses)
    body[8], body[9], body[10] = map(_ascii, (memory.device_id, memory.tp_size, memory.engine_rank))
    body[11] = _ascii(sizes[0] if sizes else 0)
    body[16] = _ascii(hello.memory.num_pages)
    body[17] = ",".join(region.kind for region in memory.kv).encode("ascii")
    body[18] = _pack("Q", sizes)
    body[20] = _pack("I", memory.kv_layer_ids)
    for index, frame in memory.opaque.items():
        if index not in _OPAQUE:
            raise ProtocolError(f"engine_memory.opaque has no entry {index}")
        body[index] = frame
    return [GUARD, *body]


# A ticket has the target of one request's delta.


def ticket_of_metadata(frames: Frames, prompt_len: int) -> handshake_pb2.KvTicket:
    """Return the ticket of SGLang's metadata frames. Raises ProtocolError for unexpected frames."""
    if len(frames) != 11 or frames[0] != GUARD or frames[1] == REGISTRATION:
        raise ProtocolError(f"not a request's metadata as SGLang 0.5.23 writes it: {len(frames)} frames")
    pages = np.frombuffer(frames[5], dtype=np.int32).tolist()
    ticket = handshake_pb2.KvTicket(
        room=_number(frames[1]),
        prompt_len=prompt_len,
        decode_prefix_len=_number(frames[9]),
        runs=runs_of_indices(pages),
        tickets_of_room=_number(frames[7]),
        no_pages=frames[10] == b"1",
        engine_state=frames[8],
    )
    if frames[6] != b"None":
        ticket.aux_slot = _number(frames[6])
    return ticket


def targets_of_state(
    ticket: handshake_pb2.KvTicket, layout: KvLayout, places: Sequence[int]
) -> list[handshake_pb2.GroupTarget]:
    """Return the targets of windows' tails and of a state.

    SGLang has a list of indices for each of its components; `places` are the components of the layout's other
    groups.

    Raises ProtocolError where the lists are not what the layout's groups need at the prompt's end.
    """
    lists = _unpack_lists(ticket.engine_state)
    if places and max(places) >= len(lists):
        raise ProtocolError(f"SGLang says where {len(lists)} of its states go, and has {max(places) + 1}")
    carried = [[PageId(unit) for unit in lists[place]] for place in places]
    return [convert.target_to_proto(target) for target in targets_of(layout, ticket.prompt_len, carried)]


def metadata_frames(ticket: handshake_pb2.KvTicket, agent_name: str, back: ReturnAddress) -> Frames:
    """Return the frames.

    Raises ProtocolError where the ticket's runs or transfer id cannot be SGLang's.
    """
    if not 0 < ticket.room < _MAX_TRANSFER_ID:
        raise ProtocolError(f"transfer {ticket.room:016x} is not one that SGLang can name")
    pages = indices_of_runs(ticket.runs)
    return [
        GUARD,
        _ascii(ticket.room),
        back.host.encode("ascii"),
        _ascii(back.port),
        agent_name.encode("ascii"),
        b"" if ticket.no_pages else np.asarray(pages, dtype=np.int32).tobytes(),
        _ascii(ticket.aux_slot) if ticket.HasField("aux_slot") else b"None",
        _ascii(ticket.tickets_of_room or 1),
        ticket.engine_state,
        _ascii(ticket.decode_prefix_len),
        b"1" if ticket.no_pages else b"0",
    ]


def runs_of_indices(pages: Sequence[int]) -> list[handshake_pb2.PageRun]:
    return convert.runs_to_proto(runs_of([PageId(page) for page in pages]))


def indices_of_runs(runs: Sequence[handshake_pb2.PageRun]) -> list[int]:
    return [int(page) for page in pages_of(convert.runs_from_proto(runs))]


# These are the last messages about a transfer.


def status_of_frames(frames: Frames) -> handshake_pb2.Status:
    states = {
        POLL_SUCCESS: handshake_pb2.Status.STATE_LANDED,
        POLL_FAILED: handshake_pb2.Status.STATE_FAILED,
    }
    if len(frames) < 4 or frames[0] != _STATUS or _number(frames[2]) not in states:
        raise ProtocolError(f"not a last word on a transfer: {frames[:3]!r}")
    reason = frames[4].decode(errors="replace") if len(frames) > 4 else ""
    return handshake_pb2.Status(room=_number(frames[1]), state=states[_number(frames[2])], reason=reason)


def status_frames(status: handshake_pb2.Status, writer_rank: int) -> Frames:
    """Return the frames: LANDED is success; any other final state is a failure."""
    landed = status.state == handshake_pb2.Status.STATE_LANDED
    poll = POLL_SUCCESS if landed else POLL_FAILED
    return [_STATUS, _ascii(status.room), _ascii(poll), _ascii(writer_rank), status.reason.encode()]


def abort_of_frames(frames: Frames) -> handshake_pb2.Abort:
    if len(frames) < 2 or frames[0] != _ABORT:
        raise ProtocolError(f"not an abort: {frames[:1]!r}")
    return handshake_pb2.Abort(
        room=_number(frames[1]), generation=_number(frames[4]) if len(frames) > 4 else 0
    )


def abort_frames(abort: handshake_pb2.Abort, back: ReturnAddress) -> Frames:
    frames = [_ABORT, _ascii(abort.room), back.host.encode("ascii"), _ascii(back.port)]
    return [*frames, _ascii(abort.generation)] if abort.generation else frames


def abort_ack_of_frames(frames: Frames) -> handshake_pb2.AbortAck:
    if len(frames) < 4 or frames[0] != _ABORT_ACK:
        raise ProtocolError(f"not an abort's ack: {frames[:1]!r}")
    return handshake_pb2.AbortAck(room=_number(frames[1]), generation=_number(frames[3]))


def abort_ack_frames(ack: handshake_pb2.AbortAck, writer_rank: int) -> Frames:
    return [_ABORT_ACK, _ascii(ack.room), _ascii(writer_rank), _ascii(ack.generation)]


def message_of_decode(frames: Frames, prompt_len: int) -> handshake_pb2.HandshakeMessage:
    """Return a decode process's ticket or abort after its Hello. Raises ProtocolError."""
    if frames and frames[0] == _ABORT:
        return handshake_pb2.HandshakeMessage(abort=abort_of_frames(frames))
    return handshake_pb2.HandshakeMessage(ticket=ticket_of_metadata(frames, prompt_len))


def message_of_prefill(frames: Frames) -> handshake_pb2.HandshakeMessage:
    """Return a prefill process's final message after its Hello. Raises ProtocolError."""
    if frames and frames[0] == _ABORT_ACK:
        return handshake_pb2.HandshakeMessage(abort_ack=abort_ack_of_frames(frames))
    return handshake_pb2.HandshakeMessage(status=status_of_frames(frames))


def _ascii(number: int) -> bytes:
    return str(number).encode("ascii")


def _number(frame: bytes) -> int:
    try:
        return int(frame)
    except ValueError:
        raise ProtocolError(f"{frame[:20]!r} is not a number") from None


def _pack(code: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def _unpack_lists(frame: bytes) -> list[list[int]]:
    """Unpack SGLang's pack_int_lists(..., "i"): the number of lists, their sizes, then all lists."""
    if not frame:
        return []
    (count,) = _unpack("I", frame[:4])
    sizes, lists, end = _unpack("I", frame[4 : 4 * (count + 1)]), [], 4 * (count + 1)
    for size in sizes:
        lists.append(_unpack("i", frame[end : end + size]))
        end += size
    if len(sizes) != count or end != len(frame):
        raise ProtocolError(f"{len(frame)} bytes are not {count} lists of indices")
    return lists


def _unpack(code: str, frame: bytes) -> list[int]:
    size = struct.calcsize(f"<{code}")
    if len(frame) % size:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not made of numbers of {size}")
    return list(struct.unpack(f"<{len(frame) // size}{code}", frame))
