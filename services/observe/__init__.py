"""This package has log lines, metrics and traces."""
