"""This room has what a process says about itself: log lines, metrics and traces."""
