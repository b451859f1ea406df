"""`isthmus top` shows the cluster as it is now, at a terminal."""
