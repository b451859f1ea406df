"""The router serves clients: it tokenizes their prompts, chooses ranks and streams the answers."""
