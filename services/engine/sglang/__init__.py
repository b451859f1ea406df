"""SGLang is an engine here, in a process of its own; its ranks speak our Handshake through its plugin."""
