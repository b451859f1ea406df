"""What a registration carries through etcd."""

from dataclasses import replace

from index.cluster import registration
from services.index.registrations import decode_registration, encode_registration
from services.wire.isthmus.v1 import index_pb2


def test_a_registration_comes_back_as_it_went():
    its = registration()
    its = replace(its, draining=True, layout=replace(its.layout, handshake_version=7))
    assert decode_registration(encode_registration(its)) == its


def test_one_from_before_registrations_had_a_handshake_version_speaks_the_first():
    old = index_pb2.Registration.FromString(encode_registration(registration()))
    old.ClearField("handshake_version")
    assert decode_registration(old.SerializeToString()).layout.handshake_version == 1
