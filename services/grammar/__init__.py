"""This package turns constraints on an answer's text into masks over tokens; only it uses llguidance."""
