"""This package finds quantized weights by name, and dequantizes them or multiplies them as stored."""
