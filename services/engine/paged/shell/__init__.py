"""The engine around a core: its thread and inbox, and the two roles' verbs."""
