"""These tests show what a registration carries through etcd."""

from dataclasses import replace

from index.cluster import registration
from services.index.joining import decode_registration, encode_registration
from services.wire.isthmus.v1 import index_pb2


def test_registrations_survive_the_wire(subtests):
    with subtests.test("a registration comes back as it went"):
        its = registration()
        its = replace(its, draining=True, layout=replace(its.layout, handshake_version=7))
        assert decode_registration(encode_registration(its)) == its
    with subtests.test("one from before registrations had a handshake version speaks the first"):
        old = index_pb2.Registration.FromString(encode_registration(registration()))
        old.ClearField("handshake_version")
        assert decode_registration(old.SerializeToString()).layout.handshake_version == 1
