"""The service that clients meet: tokenizes, places, streams."""
