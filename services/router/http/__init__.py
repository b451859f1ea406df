"""The router over HTTP: connections, keys, routes, and answers on their way."""
