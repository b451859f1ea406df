"""This module finds addresses of either IP family, and free ports, for our servers to listen on."""

import errno
import ipaddress
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.values.errors import ConfigError

_FIRST_PORT = 10_000
_LAST_PORT = 65_535
_ATTEMPTS = 100


def check_port(flag: str, port: int | None, count: int = 1) -> None:
    last = _LAST_PORT - (count - 1)
    if port is not None and not 0 <= port <= last:
        of = f" with {count} of them" if count > 1 else ""
        raise ConfigError(f"{flag} is between 0 and {last}{of}, got {port}")


def is_wildcard(host: str) -> bool:
    """Return whether the host means every address of this machine: servers listen on it, clients cannot
    connect to it.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host in ("", "0")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bindable(host: str) -> str:
    """Return the host as sockets need it, without brackets.

    `::` means every address, also IPv4's, and only IPv4's on a machine without IPv6.
    """
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and is_wildcard(bare) and not socket.has_dualstack_ipv6():
        return "0.0.0.0"
    return bare


def host_port(host: str, port: int) -> str:
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Listen with TCP_NODELAY, so that writes are sent at once. Raises OSError."""
    host = bindable(host)
    if ":" in host:
        wildcard = is_wildcard(host)
        listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=wildcard)
    else:
        listener = socket.create_server((host, port))
    # Connections inherit this (tcp(7)). asyncio sets it only on sockets made with a protocol number; on
    # others the second write would wait for the peer's delayed acknowledgement of the first, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def held_ports(host: str, count: int) -> Iterator[tuple[int, ...]]:
    """Yield ports that are free on `host`, for servers that start later, even in other processes.

    During the context no other caller gets them here, and the kernel gives them to no outgoing connection. A
    port of the kernel's own range (ip(7), ip_local_port_range) could be used by any connection before its
    server binds it, and whenever that server is down for a moment.

    Raises:
        ConfigError: Nothing can listen on `host`.
    """
    candidates = _server_ports()
    with ExitStack() as held:
        sockets = [held.enter_context(_hold_any(host, candidates)) for _ in range(count)]
        yield tuple(sock.getsockname()[1] for sock in sockets)


def free_ports(host: str, count: int) -> tuple[int, ...]:
    with held_ports(host, count) as ports:
        return ports


def _server_ports() -> Sequence[int]:
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return ()
    return [*range(_FIRST_PORT, first), *range(last + 1, _LAST_PORT + 1)]


def _hold_any(host: str, candidates: Sequence[int]) -> socket.socket:
    ports = random.sample(candidates, min(_ATTEMPTS, len(candidates)))
    try:
        for port in ports:
            try:
                return _hold(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        return _hold(host, 0)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}") from error


def _hold(host: str, port: int) -> socket.socket:
    """Bind a socket that blocks others who hold ports, but not servers that listen.

    Those bind with SO_REUSEADDR, and this socket does not listen. Raises OSError.
    """
    host = bindable(host)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_wildcard(host))
        sock.bind((host, port))  # This fails while any socket is bound to the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        sock.close()
        raise
    return sock
