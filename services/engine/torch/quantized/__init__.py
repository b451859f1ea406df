"""Quantized weights are dequantized, or multiplied as they are stored."""
