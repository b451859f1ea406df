"""Steps of single tokens are computed from buffers that stay where they are, by CUDA graphs on a GPU."""
