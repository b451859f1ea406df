"""Chats and texts become tokens here, and tokens text."""
