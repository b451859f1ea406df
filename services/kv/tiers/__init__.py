"""A rank keeps books of what lies below its pool."""
