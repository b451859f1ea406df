"""This package is a client of etcd. It does not know the index."""
