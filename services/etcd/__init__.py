"""A client of etcd: keys, leases, watches. Knows no index."""
