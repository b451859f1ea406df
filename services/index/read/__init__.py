"""This package is a router's side of the index, built from etcd's watch."""
