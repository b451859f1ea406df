"""This package has what a process reports about itself: log lines, metrics and traces."""
