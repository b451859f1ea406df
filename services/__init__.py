"""Isthmus: the router, prefill and decode services and what they stand on."""
