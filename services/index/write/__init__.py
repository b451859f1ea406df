"""This package is a rank's side of the index: its registration and its blocks, under its lease."""
