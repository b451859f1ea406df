"""The end of a transfer that writes: rooms, posts, and the thread that makes them."""
