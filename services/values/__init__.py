"""Values that everybody exchanges, checked when made. Pure: no I/O, no clock, no chance."""
