"""Small operations of a definition are fused on a GPU."""
