"""Whatever bytes come, what is read of them is what protobuf reads."""

from array import array

from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from services.wire.generation_messages import length_delimited, read_request
from services.wire.isthmus.v1.generation_pb2 import Chat, GenerateRequest, TokenIds

MANY = list(range(200, 1_000))  # from 1 KiB on they are read apart
MANY_AND_UNKNOWN = TokenIds(ids=MANY).SerializeToString() + b"\x12\x01x"

ids = st.lists(st.integers(0, 2**32 - 1), max_size=50).map(lambda few: MANY + few)
requests = st.builds(
    GenerateRequest, request_id=st.text(max_size=5), priority=st.integers(-9, 9)
) | st.builds(
    lambda numbers, tenant: GenerateRequest(token_ids=TokenIds(ids=numbers), tenant=tenant),
    ids,
    st.text(max_size=5),
)


def whole(message):
    """As one request: None where it is none."""
    try:
        read = read_request(message)
    except DecodeError:
        return None
    request = GenerateRequest()
    request.CopyFrom(read.request)
    if read.ids is not None:
        assert request.WhichOneof("prompt") == "token_ids" and not request.token_ids.ids
        assert read.ids.ids == array("I", TokenIds.FromString(length_delimited(1, read.ids.varints)).ids)
        request.token_ids.ids.extend(read.ids.ids)
    return request


def by_protobuf(message):
    try:
        return GenerateRequest.FromString(message)
    except DecodeError:
        return None


@given(st.lists(requests | st.just(GenerateRequest(text="x" * 2_000)), max_size=3))
@example([GenerateRequest(token_ids=TokenIds(ids=MANY)), GenerateRequest(chat=Chat())])
def test_parts_of_a_message_are_merged(parts):
    message = b"".join(part.SerializeToString() for part in parts)
    assert whole(message) == by_protobuf(message)


@given(st.data())
def test_what_is_not_well_written_is_read_as_protobuf_reads_it(data):
    message = bytearray(data.draw(requests).SerializeToString())
    first, last = slice(0, 12), slice(-12, None)
    for part in data.draw(st.lists(st.sampled_from([first, last]), max_size=3)):
        message[part] = data.draw(st.binary(max_size=14))
    assert whole(bytes(message)) == by_protobuf(bytes(message))


@given(st.integers(10, 990), st.binary(min_size=1, max_size=12))
def test_so_are_ids(at, octets):
    message = bytearray(GenerateRequest(token_ids=TokenIds(ids=MANY), tenant="t").SerializeToString())
    message[at : at + len(octets)] = octets
    assert whole(bytes(message)) == by_protobuf(bytes(message))


def test_many_ids_are_read_apart_and_the_rest_by_protobuf(subtests):
    for request_id in ["", "r"]:
        with subtests.test(request_id=request_id):
            request = GenerateRequest(request_id=request_id, token_ids=TokenIds(ids=MANY), tenant="t")
            read = read_request(request.SerializeToString())
            assert read.ids is not None and read.ids.ids == array("I", MANY)
    for message in [
        GenerateRequest(token_ids=TokenIds(ids=range(10))).SerializeToString(),
        GenerateRequest(text="x" * 2_000).SerializeToString(),
        length_delimited(GenerateRequest.TOKEN_IDS_FIELD_NUMBER, MANY_AND_UNKNOWN),
        b"\x80" * 100_000,
        b"\x78\x01" * 100_000 + GenerateRequest(token_ids=TokenIds(ids=MANY)).SerializeToString(),
    ]:
        with subtests.test(message=message):
            assert whole(message) == by_protobuf(message)
            if by_protobuf(message) is not None:
                assert read_request(message).ids is None
