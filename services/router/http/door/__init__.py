"""What is before the routes: connections, TLS, the framing of bodies, keys, the ids of requests."""
