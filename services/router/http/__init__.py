"""The router is reached over HTTP: connections, keys, routes, and answers on their way."""
