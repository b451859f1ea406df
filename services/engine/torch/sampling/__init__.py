"""This package chooses tokens from logits, under constraints and biases, and scores them."""
