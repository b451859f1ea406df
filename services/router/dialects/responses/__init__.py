"""OpenAI's responses are read, answered and stored."""
