"""A differential fuzz: small clusters of real torch ranks, every token checked against transformers."""
