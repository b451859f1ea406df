"""Keys say who may use a router, and as whom."""
