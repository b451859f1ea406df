"""Tokens are chosen from logits here, under constraints and biases, and what is asked of them is told."""
