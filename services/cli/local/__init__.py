"""This package runs a cluster of processes on this machine."""
