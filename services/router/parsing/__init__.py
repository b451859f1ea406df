"""An answer is split here into content, thinking and calls of tools."""
