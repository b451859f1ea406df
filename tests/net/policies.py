"""This module tells whether a test may choose how threads take turns."""

import os
import threading


def may_choose() -> bool:
    """Tried in a thread that ends with it."""
    chosen = []

    def choose():
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            return
        chosen.append(True)

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    return bool(chosen) and os.sched_getscheduler(0) == os.SCHED_OTHER
