"""The engine core of our own engines: pages, radix tree, batches and tickets around any model runner."""
