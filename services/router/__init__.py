"""The router tokenizes prompts, chooses ranks and streams answers."""
