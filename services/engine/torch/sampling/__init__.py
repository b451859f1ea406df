"""Tokens are chosen from logits, under constraints and biases."""
