"""Here is the process around an engine, in either role."""
