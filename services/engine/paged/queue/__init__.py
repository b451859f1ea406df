"""The queue says who comes in next, and how much room it must be given."""
