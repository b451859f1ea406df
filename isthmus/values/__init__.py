"""These values go to a router and come back."""
