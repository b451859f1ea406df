"""Quantized weights are found by their names, and dequantized or multiplied as they are stored."""
