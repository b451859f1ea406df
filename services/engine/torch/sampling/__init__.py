"""Tokens are chosen from logits, under constraints and biases, and scored; a GPU uses Triton kernels."""
