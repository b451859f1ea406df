"""This module tells whether this machine can be spoken to over IPv6."""

import socket

import pytest


def _has_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


needs_ipv6 = pytest.mark.skipif(not _has_loopback(), reason="this machine has no ::1")
LOOPBACKS = ("127.0.0.1", "[::1]")
