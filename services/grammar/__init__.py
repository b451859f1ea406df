"""Constraints on an answer's text as masks over tokens: the door to llguidance."""
