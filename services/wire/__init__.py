"""This package has the cluster's messages, and translates them to our own values."""
