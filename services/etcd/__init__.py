"""This is a client of etcd: keys, leases, watches. It knows no index."""
