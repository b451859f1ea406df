"""Requests are replayed here in virtual time, by the router's own placer over simulated ranks."""
