"""This package follows a process and its children: started, ready, alive, stopped, killed."""
