"""The OpenAI-compatible API over HTTP."""
