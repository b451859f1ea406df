"""What a process says about itself: log lines, metrics, traces."""
