"""These are messages of the API that say what a router knows of ranks and of prices."""
