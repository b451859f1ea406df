"""SGLang as an engine: in a process of its own, its ranks speaking our Handshake through its plugin."""
