"""Steps are computed from buffers that stay where they are, and replayed from CUDA graphs on a GPU."""
