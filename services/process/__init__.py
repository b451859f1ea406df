"""A process and its children: started, ready, alive, stopped, killed."""
