"""The page that a router serves: a browser's files (static/), which ask the HTTP API for what they show."""
