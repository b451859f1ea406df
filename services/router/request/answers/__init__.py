"""The answers to one request."""
