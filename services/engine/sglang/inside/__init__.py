"""This runs in SGLang's own processes: its NIXL classes with our Handshake, and a door to its schedulers."""
