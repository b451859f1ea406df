"""This package reads settings from flags, and writes them back as flags."""
