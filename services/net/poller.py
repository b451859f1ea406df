"""grpc.aio's poller is the thread that tells a process's event loop what gRPC's core has done.

It wakes for a few microseconds with each event of each call. If it interrupts the loop's thread for that, as
threads that have slept may, a token is half a dozen switches between the two. So it waits until the loop
sleeps or its slice is over, and then tells of all that has come.

Without that a saturated router takes 15 % more CPU time for an answer of 128 tokens (32 streams, in turn:
14.5, 13.5, 12.3 and 13.3 ms with it; 15.2, 14.7, 17.0 and 15.0 without).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio


def start() -> None:
    """Start the poller in a process's loop, before its first server and channel, which would start it.

    The thread of the core's timers starts with it, and is as patient.
    """
    with _patient_threads():
        grpc.aio.init_grpc_aio()


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Make threads that this one starts within, and those that they start, wait for who runs.

    They do not interrupt what runs when they are woken: they wait until it sleeps or its slice is over
    (sched(7): SCHED_BATCH). This has no effect where this thread was given another policy than the usual one,
    or may not choose.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER or not _choose(os.SCHED_BATCH):
        yield
        return
    try:
        yield
    finally:
        _choose(os.SCHED_OTHER)


def _choose(policy: int) -> bool:
    """Choose for this thread; return False where it may not, as in some sandboxes."""
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True
