"""gRPC and TLS: errors, servers, channels, ports. Knows no service."""
