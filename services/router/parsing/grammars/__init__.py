"""Grammars go the other way round: by them an answer calls tools as its model writes calls."""
