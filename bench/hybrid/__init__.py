"""Models of several groups: what decode's hits, resume points and states are worth, and what they weigh."""
