"""This room is the command `isthmus`."""
