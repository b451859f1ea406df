from etcd.fixtures import etcd, etcd_endpoint, keys, own_server

__all__ = ["etcd", "etcd_endpoint", "keys", "own_server"]
