"""This package is a rank's side of the index, under its lease."""
