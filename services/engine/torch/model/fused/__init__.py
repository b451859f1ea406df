"""Small operations of a definition are fused on a GPU; they are known by what they compute."""
