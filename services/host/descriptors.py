"""This module sets how many files and sockets this process may have open."""

import resource

# This is the kernel's own default limit (fs.nr_open), for an unlimited hard limit, as in many containers.
_MOST = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and return it.

    The common default of 1,024 is for programs that call select(2). A router's clients use it up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft
