"""`isthmus top`: the cluster as it is now, at a terminal."""
