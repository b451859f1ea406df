"""These values are sent to a router and returned by it."""
