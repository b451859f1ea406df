"""Tokens are chosen from logits here, under constraints and biases, and scored where that is requested."""
