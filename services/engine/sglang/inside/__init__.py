"""This package runs in SGLang's own processes."""
