"""This module has what an operator deletes by hand, or etcd itself: our services delete in transactions
alone."""

from services.etcd.connection import Method
from services.etcd.etcd_client import Etcd, prefix_end
from services.wire.etcd import etcd_pb2

_DELETE = Method("/etcdserverpb.KV/DeleteRange", etcd_pb2.DeleteRangeRequest, etcd_pb2.DeleteRangeResponse)


async def delete(etcd: Etcd, key: bytes) -> None:
    await etcd.connection.unary(_DELETE, etcd_pb2.DeleteRangeRequest(key=key))


async def delete_prefix(etcd: Etcd, prefix: bytes) -> None:
    request = etcd_pb2.DeleteRangeRequest(key=prefix, range_end=prefix_end(prefix))
    await etcd.connection.unary(_DELETE, request)
