"""What sequences hold of windows and recurrent states, and where a rank can go on computing. Pure."""
