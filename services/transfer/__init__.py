"""Moving KV pages between ranks."""
