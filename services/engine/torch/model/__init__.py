"""Model definitions of transformers over pages and slots: probed, wrapped, checked; none by its name."""
