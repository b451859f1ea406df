"""The receiving end of a transfer owns the memory: it sends tickets out, on streams to ranks that send."""
