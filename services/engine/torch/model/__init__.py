"""Model definitions of transformers run over pages and slots here."""
