"""This benchmark measures what the index costs: `python -m bench.index --json FILE`."""
