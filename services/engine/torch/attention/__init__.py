"""Layers attend to pages here: chunks by torch, single tokens by kernels."""
