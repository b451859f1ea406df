"""This package decides where a request goes."""
