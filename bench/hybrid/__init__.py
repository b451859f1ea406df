"""Models of several groups: what decode's hits, checkpoints and states are worth, and what they weigh."""
