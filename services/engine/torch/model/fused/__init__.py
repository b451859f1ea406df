"""Parts of definitions for which torch is called often, as kernels that are called once, on a CPU."""
