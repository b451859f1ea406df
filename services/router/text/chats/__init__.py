"""Chats become prompts: what templates take, and past answers as the ids that they were."""
