"""Decoding with drafts against decoding without, on models made so that drafts can be right."""
