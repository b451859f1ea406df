"""A rank keeps books here of what lies below its pool: the keys of blocks, slots, and if reading pays."""
