"""Layers attend to pages here: chunks with torch, single tokens with kernels of numba or Triton."""
