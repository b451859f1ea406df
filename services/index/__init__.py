"""This is the cluster-wide prefix index: written by ranks, kept in etcd, read by routers."""
