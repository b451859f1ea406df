"""This room decides where a request goes."""
