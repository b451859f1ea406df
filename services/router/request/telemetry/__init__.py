"""Metrics, traces and a line of the log tell those who run the cluster of a request."""
