"""This module knows how many files and sockets this process may have open at a time."""

import resource

# The kernel itself allows so many by default (fs.nr_open), where the hard limit is none, as in many
# containers.
_MOST = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and return it.

    1,024, with which many a shell starts, is for programs that call select(2). A router's clients use it up.
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
