"""This room reads what a checkpoint's config.json says of its context, its weights and its KV. It is pure."""
