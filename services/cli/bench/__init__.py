"""`isthmus bench` sends a load of requests, and reports what its clients measure."""
