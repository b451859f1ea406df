"""Free ports are free, differ, and cannot be taken by an outgoing connection."""

import socket
from pathlib import Path

import pytest

from services import ports
from services.errors import ConfigError


def test_they_differ_and_can_be_bound():
    found = ports.free_ports("127.0.0.1", 8)
    assert len(set(found)) == 8
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_the_kernel_gives_them_to_nobody():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if not ports._server_ports():
        pytest.skip("here the kernel has taken every port for itself")
    assert not [port for port in ports.free_ports("127.0.0.1", 50) if first <= port <= last]


def test_taken_ports_are_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ports, "_server_ports", lambda: [taken.getsockname()[1]])
        (found,) = ports.free_ports("127.0.0.1", 1)
        assert found != taken.getsockname()[1]


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        ports.free_ports("192.0.2.1", 1)
