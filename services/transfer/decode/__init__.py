"""The decode end of a transfer owns the memory: it sends tickets out, on streams to prefill ranks."""
