"""These commands look at a cluster, or at a model, and change nothing."""
