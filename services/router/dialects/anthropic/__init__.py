"""Anthropic's messages are read and answered."""
