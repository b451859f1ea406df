"""This package runs model definitions of transformers over pages and slots; it knows no model by name."""
