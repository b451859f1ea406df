"""Chats and texts become tokens, and tokens text: templates, tokenizers, stop strings, past answers."""
