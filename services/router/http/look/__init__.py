"""What is only looked at: models, metrics, the server itself, the cluster as it changes."""
