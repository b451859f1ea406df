"""When a process is told to end."""

import asyncio
import signal


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, from now to the end of the running loop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping
