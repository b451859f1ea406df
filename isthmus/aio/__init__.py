"""The client for asyncio; it belongs to the loop in which it is first used."""
