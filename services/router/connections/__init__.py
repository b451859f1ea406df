"""The router has a stream to every rank."""
