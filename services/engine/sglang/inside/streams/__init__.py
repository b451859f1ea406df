"""The Handshake of a process of SGLang's: its control messages as ours, over gRPC."""
