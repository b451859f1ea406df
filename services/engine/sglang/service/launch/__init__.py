"""What a worker's SGLang is started with, what is refused before, and the process that it becomes."""
