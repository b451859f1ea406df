"""These texts may have what follows: a sequence's own, its salt's, the radix tree's."""
