"""The pure core of KV bookkeeping: no I/O, no clock, no chance."""
