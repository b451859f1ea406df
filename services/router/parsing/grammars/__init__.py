"""The other way round: grammars by which an answer calls tools as its model writes calls."""
