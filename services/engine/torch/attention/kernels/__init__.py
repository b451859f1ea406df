"""Tokens attend to pages where they lie, and K and V go in and out: by numba on a CPU, Triton on a GPU."""
