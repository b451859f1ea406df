"""What the index costs: `python -m bench.index --json FILE`."""
