"""grpc.aio's poller is the thread that tells a process's event loop what gRPC's core has done.

It wakes for a few microseconds with each event of each call. If it interrupts the loop's thread for that, as
threads that have slept may, a token is half a dozen switches between the two. So it waits until the loop
sleeps or its slice is over, and then tells of all that has come.
"""

import grpc.aio

from services.host.scheduling import patient_threads


def start() -> None:
    """Start the poller in a process's loop, before its first server and channel, which would start it.

    The thread of the core's timers starts with it, and is as patient.
    """
    with patient_threads():
        grpc.aio.init_grpc_aio()
