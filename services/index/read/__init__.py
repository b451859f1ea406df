"""This is a router's side of the index: a copy in memory, made of what etcd's watch shows."""
