"""A stream to every rank."""
