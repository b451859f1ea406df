"""This package reads a model's context, weights and KV from its checkpoint's config.json, and is pure."""
