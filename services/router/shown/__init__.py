"""What a router knows of ranks and of prices, as messages of its API."""
