"""The shell around a core has its thread and inbox, and the two roles' verbs."""
