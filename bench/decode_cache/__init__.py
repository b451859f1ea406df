"""Conversations through a decode rank that keeps their prefix and through one that does not, side by side."""
