"""The receiving end of a transfer owns the memory, and sends tickets out."""
