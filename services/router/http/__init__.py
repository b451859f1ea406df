"""The router is reached over HTTP."""
