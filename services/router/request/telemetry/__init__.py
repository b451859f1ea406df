"""What is told of a request to those who run the cluster: metrics, traces, a line of the log."""
