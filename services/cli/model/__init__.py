"""`isthmus make-model` and `isthmus fetch-model` write checkpoints: random ones, and real ones."""
