"""Tokens are chosen from logits, under constraints and biases, and scored; on a GPU by Triton's kernels."""
