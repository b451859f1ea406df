"""A process of SGLang's speaks the Handshake: its control messages become ours, over gRPC."""
