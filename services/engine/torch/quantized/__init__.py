"""Quantized weights are told by the names of their parts, and made numbers again, here."""
