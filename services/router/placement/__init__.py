"""Where a request goes: the decision, and what it is made of."""
