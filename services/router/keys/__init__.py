"""Who may use a router."""
