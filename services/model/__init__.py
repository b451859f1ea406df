"""What a checkpoint's config.json says: its context, its weights, its KV. Pure."""
