"""What both have by one name is copied; what one of them lacks, or has as a message, is not."""

from dataclasses import dataclass

import pytest

from services.values.errors import ProtocolError
from services.wire.fields import message_of, shared_fields, value_of
from services.wire.isthmus.v1 import common_pb2, handshake_pb2


@dataclass(frozen=True)
class Ticket:
    room: int
    prompt_len: int
    write_until_s: float
    aux_slot: int | None = 7
    runs: tuple[int, ...] = ()  # messages there
    ours_alone: str = "kept"


def test_names_that_both_have_are_copied_and_the_rest_is_said_otherwise(subtests):
    with subtests.test("names that both have are copied and the rest is said otherwise"):
        ticket = Ticket(5, 100, 2.5, aux_slot=None)
        pb = message_of(handshake_pb2.KvTicket, ticket, prompt_len=90)
        assert pb == handshake_pb2.KvTicket(room=5, prompt_len=90, write_until_s=2.5)
        assert value_of(Ticket, pb, runs=(1,)) == Ticket(
            5, 90, 2.5, runs=(1,)
        )  # unset: the dataclass's default
        pb.aux_slot = 0
        assert value_of(Ticket, pb).aux_slot == 0
    with subtests.test("messages and enums are never copied"):
        assert set(shared_fields(Ticket, handshake_pb2.KvTicket.DESCRIPTOR).all) == {
            *("room", "prompt_len", "write_until_s", "aux_slot")
        }
    with subtests.test("what is repeated becomes a tuple"):

        @dataclass
        class Sampling:
            stop: tuple[str, ...]

        assert value_of(Sampling, common_pb2.SamplingParams(stop=["a", "b"])).stop == ("a", "b")


def test_a_number_that_is_not_finite_is_named():
    pb = handshake_pb2.KvTicket(write_until_s=float("nan"))
    with pytest.raises(ProtocolError, match=r"^KvTicket\.write_until_s must be finite, got nan$"):
        value_of(Ticket, pb)
