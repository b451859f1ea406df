"""The machine under a process: ports, file descriptors, children. Knows nothing of us."""
