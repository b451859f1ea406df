"""Constraints on an answer's text become masks over tokens here."""
