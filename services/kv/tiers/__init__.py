"""A rank keeps books of what lies below its pool: keys of blocks, slots, and whether reading pays."""
