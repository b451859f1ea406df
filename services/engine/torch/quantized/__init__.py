"""Quantized weights are told by their parts' names, and made numbers again or multiplied as they are."""
