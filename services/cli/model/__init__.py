"""`isthmus make-model` and `isthmus fetch-model` write checkpoints."""
