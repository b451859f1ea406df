"""This package is the cluster-wide prefix index: ranks write it, etcd keeps it, routers read it."""
