"""Linear layers for few rows, on a CPU."""
