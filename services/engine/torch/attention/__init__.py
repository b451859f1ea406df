"""Attention over pages, where they lie: on a CPU and on a GPU."""
