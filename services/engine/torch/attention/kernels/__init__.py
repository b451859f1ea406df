"""Single tokens over pages, where they lie: by numba on a CPU, by Triton on a GPU."""
