"""Ids that are carried packed are what protobuf packs."""

from array import array

from hypothesis import example, given
from hypothesis import strategies as st

from services.wire.generation_messages import PackedIds, length_delimited, unpacked
from services.wire.isthmus.v1 import decode_pb2
from services.wire.isthmus.v1.generation_pb2 import TokenIds

BORDERS = [n for bits in (7, 14, 21, 28) for n in (2**bits - 1, 2**bits)] + [0, 1, 2**32 - 1]


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(BORDERS), max_size=300))
@example([])
@example([0])
@example(BORDERS)
@example([2**32 - 1] * 30_000)  # its length takes three bytes
def test_they_are_those_of_protobuf(numbers):
    packed = PackedIds.from_proto(TokenIds(ids=numbers))
    assert packed.ids == array("I", numbers)
    assert packed == PackedIds.of(numbers)
    assert packed.field(2) == decode_pb2.Start(prompt_ids=numbers).SerializeToString()


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(BORDERS), min_size=1, max_size=300))
@example([0])
@example(BORDERS)
@example([2**32 - 1] * 2_000)
def test_what_is_packed_comes_back(numbers):
    assert unpacked(PackedIds.of(numbers).varints) == array("I", numbers)


@given(st.lists(st.integers(0, 300), max_size=3))
def test_what_a_newer_client_adds_is_no_id(numbers):
    added = decode_pb2.AbortCommand(request_id="unknown").SerializeToString().replace(b"\x0a", b"\x12", 1)
    sent = TokenIds(ids=numbers).SerializeToString()
    for message in (sent + added, added + sent):
        assert PackedIds.from_proto(TokenIds.FromString(message)) == PackedIds.of(numbers)


def test_a_field_can_be_merged_into_a_message_and_stand_in_another():
    start = decode_pb2.Start(request_id="r", priority=3)
    whole = decode_pb2.Start(request_id="r", priority=3, prompt_ids=[7, 300, 70_000])
    field = PackedIds.of([7, 300, 70_000]).field(2)
    command = length_delimited(1, start.SerializeToString() + field)
    assert decode_pb2.Command.FromString(command) == decode_pb2.Command(start=whole)
    start.MergeFromString(field)
    assert start == whole
