"""The process around an engine, in either role."""
