"""A checkpoint's config.json says its context, its weights and its KV; this package reads it, and is pure."""
