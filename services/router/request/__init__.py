"""One client request, from its prompt to its last response."""
