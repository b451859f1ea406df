"""This room reads settings from flags once, and writes them back as flags."""
