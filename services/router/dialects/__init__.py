"""HTTP APIs of others are translated here, without I/O or a clock."""
