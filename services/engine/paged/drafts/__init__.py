"""Drafts guess what a sequence goes on with, so that one step can verify several tokens."""
