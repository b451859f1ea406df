"""`isthmus make-model`: small random checkpoints of many families."""
