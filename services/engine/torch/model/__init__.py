"""Model definitions of transformers run over pages and slots here; none is known by its name."""
