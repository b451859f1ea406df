"""`isthmus chat` holds a conversation at a terminal, or through a pipe."""
