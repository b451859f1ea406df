"""This package is a router's side of the index: a copy in memory, built from etcd's watch."""
