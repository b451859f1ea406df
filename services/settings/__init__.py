"""Settings, read from flags once and written back as flags."""
