"""This is a rank's side of the index: its registration, its blocks, under its lease."""
