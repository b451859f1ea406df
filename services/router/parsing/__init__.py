"""What a model wrote, told apart: content, thinking and calls of tools."""
