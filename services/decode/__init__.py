"""The service that holds KV and generates."""
