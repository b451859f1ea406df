"""These values are used by all packages, and check themselves. They are pure."""
