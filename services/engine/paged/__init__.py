"""The engine core of our own engines has pages, radix tree, batches and tickets around any model runner."""
