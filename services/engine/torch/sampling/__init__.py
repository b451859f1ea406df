"""Tokens come of logits here: constraints and biases are laid on, a token is chosen, and what is asked of it
is told.
"""
