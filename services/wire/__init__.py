"""The cluster speaks so on the wire: by code generated from proto/, and its translation to our own values."""
