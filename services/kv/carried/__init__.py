"""Sequences hold windows and recurrent states, and a rank keeps checkpoints to go on from. This is pure."""
