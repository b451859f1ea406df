"""`isthmus completion`: what a shell needs to know to complete the command."""
