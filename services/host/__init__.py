"""This package knows the machine under a process."""
