"""Single tokens attend to pages where they lie: numba's code does it on a CPU, Triton's on a GPU."""
