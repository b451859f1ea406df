"""This engine is SGLang in its own processes, whose ranks use our Handshake through a plugin."""
