"""A tier keeps KV below a rank's pool, in memory or in a file."""
