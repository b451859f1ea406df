"""A transfer moves KV pages between ranks."""
