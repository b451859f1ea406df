"""The peers of the router are SGLang's, and one that does nothing."""
