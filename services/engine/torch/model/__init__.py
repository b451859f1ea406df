"""Model definitions of transformers run over pages and slots here: probed, wrapped, checked, and none by its
name.
"""
