"""Replays a trace in virtual time through the real placement, prefix caches and page allocators."""
