"""What a router is measured beside: SGLang's, and one that does nothing."""
