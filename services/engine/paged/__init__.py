"""The core of our own engines works around any model runner."""
