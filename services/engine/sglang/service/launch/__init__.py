"""A worker's SGLang is started with this; some is refused before, and this is the process that it becomes."""
