"""The engines are here, behind one boundary (base)."""
