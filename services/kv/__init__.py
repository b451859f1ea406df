"""The pure core of KV bookkeeping needs no I/O, no clock, no chance."""
