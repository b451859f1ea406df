"""This package reads a model's context, weights and KV from its config.json, and is pure."""
