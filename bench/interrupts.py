"""A benchmark that is told to end does so as by Ctrl-C, so that all it started and wrote goes with it."""

import signal


def end_as_by_ctrl_c() -> None:
    """End as by Ctrl-C at SIGTERM too, which `timeout` and supervisors send. Call it first in a program's
    main thread.

    A shell starts what runs behind a `&` in a script with SIGINT ignored; here it is heeded.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
