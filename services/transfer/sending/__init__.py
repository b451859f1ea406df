"""The sending end of a transfer writes: it has the rooms, the posts, and the thread that makes them."""
