"""Here is what one router knows of the ranks beyond the index. Pure."""
