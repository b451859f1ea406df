"""Model definitions of transformers run over pages and slots here; no model is known by its name."""
