"""Small operations of a definition are fused on a GPU; they are recognized by what they compute."""
