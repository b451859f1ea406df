"""`isthmus bench` sends a load of prompts, and tells what its clients see."""
