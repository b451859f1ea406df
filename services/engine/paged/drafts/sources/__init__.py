"""Sources find texts in which what follows may have stood before: a sequence's own, its salt's, the tree's."""
