"""`isthmus bench`: a load of prompts, and what its clients see."""
