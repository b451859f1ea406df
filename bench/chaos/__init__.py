"""A cluster of real processes under random kills and stops, with every token of every answer checked."""
