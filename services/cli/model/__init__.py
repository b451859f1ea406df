"""`isthmus make-model` and `isthmus fetch-model`: random checkpoints of many families, and real ones."""
