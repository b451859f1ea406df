"""This package turns constraints on an answer's text into masks over tokens; it is the door to llguidance."""
