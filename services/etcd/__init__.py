"""This package is a client of etcd: keys, leases and watches. It does not know the index."""
