"""This room knows a process and its children: started, ready, alive, stopped, killed."""
