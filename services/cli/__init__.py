"""This package is the command `isthmus`."""
