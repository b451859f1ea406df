from etcd.fixtures import etcd, keys, own_server

__all__ = ["etcd", "keys", "own_server"]
