"""Sources find texts in which what follows may have stood before: the sequence's, its salt's, the tree's."""
