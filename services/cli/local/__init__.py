"""This room runs a cluster of processes on this machine."""
