"""What goes to a router and comes back, as values."""
