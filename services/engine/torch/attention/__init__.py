"""Layers attend to pages here, with torch and kernels of numba or Triton."""
