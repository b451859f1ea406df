"""A scheduler is asked directly, past its HTTP server: requests, their answers and its load."""
