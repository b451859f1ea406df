"""This benchmark measures what the router costs: one placement decision, and a request's whole way through
its process."""
