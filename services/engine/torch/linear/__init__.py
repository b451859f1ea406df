"""Linear layers for few rows are computed here, on a CPU."""
