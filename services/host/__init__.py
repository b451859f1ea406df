"""This package knows the machine under a process: its ports, memory, file descriptors and children."""
