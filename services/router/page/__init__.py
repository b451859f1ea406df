"""The router serves a page: a browser's files (static/), which ask the HTTP API for what they show."""
