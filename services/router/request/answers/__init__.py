"""The answers to one request: one, several to one prompt, the best of more."""
