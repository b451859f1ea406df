"""The engines, behind one boundary (base)."""
