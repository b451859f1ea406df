"""These values are exchanged by everybody, and checked when made. Pure: no I/O, no clock, no chance."""
