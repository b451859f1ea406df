"""This package has gRPC and TLS: errors, servers and channels. It knows no service."""
