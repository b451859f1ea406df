"""This package holds what one router knows of the ranks beyond the index. It is pure."""
