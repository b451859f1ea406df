"""The end of a transfer that owns the memory: tickets out, streams to prefill ranks."""
