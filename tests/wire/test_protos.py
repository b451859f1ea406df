"""These tests show what other languages' generators need of the protos."""

from google.protobuf import descriptor_pb2

from services.wire.etcd import etcd_pb2
from services.wire.isthmus.v1 import (
    common_pb2,
    decode_pb2,
    generation_pb2,
    handshake_pb2,
    index_pb2,
    prefill_pb2,
    rank_pb2,
)

SERVICES = (common_pb2, decode_pb2, generation_pb2, handshake_pb2, index_pb2, prefill_pb2, rank_pb2)


def test_go_finds_its_package_named(subtests):
    """protoc-gen-go refuses a file that names none, and files of one package that name several."""
    for modules, go_package in [(SERVICES, "isthmus/v1;isthmusv1"), ([etcd_pb2], "isthmus/etcd;etcd")]:
        with subtests.test(modules=modules):
            for module in modules:
                file = descriptor_pb2.FileDescriptorProto()
                module.DESCRIPTOR.CopyToProto(file)
                assert file.options.go_package == go_package, file.name
