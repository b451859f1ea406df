"""This is what a process of SGLang's holds of the KV, in the words of our layout, and what crosses of it.
Pure."""
