"""A client request is served here, from its prompt to its last response."""
