"""This module encodes messages and prefix records as the bytes that are kept in etcd, and decodes them.

`fill` and every `decode_*` raise ProtocolError if the value is torn, or names another place than its key.
"""

import math

from google.protobuf.message import DecodeError, Message

from services.index.keys import HeadKey, LogKey, SnapshotKey
from services.index.records import (
    PrefixDelta,
    PrefixHead,
    PrefixSnapshot,
    pack_hashes,
    unpack_hashes,
)
from services.values.errors import ProtocolError
from services.values.rank import Generation
from services.wire.fields import message_of
from services.wire.isthmus.v1 import index_pb2


def to_bytes(pb: Message) -> bytes:
    value: bytes = pb.SerializeToString()
    return value


def fill(pb: Message, value: bytes) -> None:
    try:
        pb.ParseFromString(value)
    except DecodeError as error:
        raise ProtocolError(f"not a {type(pb).__name__}: {error}") from error


def encode_head(head: PrefixHead) -> bytes:
    return to_bytes(message_of(index_pb2.PrefixHead, head))


def encode_snapshot(snapshot: PrefixSnapshot) -> bytes:
    return to_bytes(
        message_of(
            index_pb2.PrefixSnapshot,
            snapshot,
            hashes=pack_hashes(snapshot.hashes),
            resumable=pack_hashes(snapshot.resumable),
            files=pack_hashes(snapshot.files),
        )
    )


def encode_delta(delta: PrefixDelta) -> bytes:
    return to_bytes(
        message_of(
            index_pb2.PrefixDelta,
            delta,
            added=pack_hashes(delta.added),
            removed=pack_hashes(delta.removed),
            resumable_added=pack_hashes(delta.resumable_added),
            resumable_removed=pack_hashes(delta.resumable_removed),
            files_added=pack_hashes(delta.files_added),
            files_removed=pack_hashes(delta.files_removed),
        )
    )


def decode_record(
    key: HeadKey | SnapshotKey | LogKey, value: bytes
) -> PrefixHead | PrefixSnapshot | PrefixDelta:
    match key:
        case HeadKey():
            return _decode_head(value)
        case SnapshotKey():
            return _decode_snapshot(key, value)
        case LogKey():
            return _decode_delta(key, value)


def _decode_head(value: bytes) -> PrefixHead:
    pb = index_pb2.PrefixHead()
    fill(pb, value)
    return PrefixHead(Generation(pb.generation), pb.epoch, pb.base_seq, pb.snapshot_chunks, _age_s(pb.age_s))


def _decode_snapshot(key: SnapshotKey, value: bytes) -> PrefixSnapshot:
    pb = index_pb2.PrefixSnapshot()
    fill(pb, value)
    if (pb.epoch, pb.chunk) != (key.epoch, key.chunk):
        raise ProtocolError(f"a snapshot of epoch {pb.epoch}, chunk {pb.chunk} lies at {key}")
    hashes, resumable, files = map(unpack_hashes, (pb.hashes, pb.resumable, pb.files))
    return PrefixSnapshot(Generation(pb.generation), pb.epoch, pb.chunk, hashes, resumable, files)


def _decode_delta(key: LogKey, value: bytes) -> PrefixDelta:
    pb = index_pb2.PrefixDelta()
    fill(pb, value)
    if pb.seq != key.seq:
        raise ProtocolError(f"a delta with seq {pb.seq} lies at {key}")
    return PrefixDelta(
        Generation(pb.generation),
        pb.epoch,
        pb.seq,
        unpack_hashes(pb.added),
        unpack_hashes(pb.removed),
        _age_s(pb.age_s),
        unpack_hashes(pb.resumable_added),
        unpack_hashes(pb.resumable_removed),
        unpack_hashes(pb.files_added),
        unpack_hashes(pb.files_removed),
    )


def _age_s(age_s: float) -> float:
    if not (math.isfinite(age_s) and age_s >= 0):
        raise ProtocolError(f"an age must be a number of seconds, got {age_s}")
    return age_s
