"""Layers attend to pages here: chunks by torch, single tokens by kernels of numba or Triton."""
