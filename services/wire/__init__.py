"""What the cluster says on the wire: code generated from proto/, and its translation to our own values."""
