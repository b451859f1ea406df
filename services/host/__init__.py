"""This room knows the machine under a process: its ports, file descriptors and children."""
