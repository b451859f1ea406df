"""The decode service holds KV and generates."""
