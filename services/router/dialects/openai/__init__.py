"""OpenAI's chat completions and completions are read and answered."""
