"""This module chooses how the kernel takes turns between the threads of a process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patient_threads() -> Iterator[None]:
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
