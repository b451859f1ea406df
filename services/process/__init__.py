"""This package follows a process and its children."""
