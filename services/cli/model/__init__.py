"""`isthmus make-model` and `isthmus fetch-model`: random checkpoints, and real ones."""
