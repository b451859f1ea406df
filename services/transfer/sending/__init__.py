"""The sending end of a transfer writes."""
