"""Free ports are free, differ, and cannot be taken by an outgoing connection."""

import socket
from pathlib import Path

import grpc.aio
import pytest

from net.ipv6 import needs_ipv6
from services.host import ports
from services.values.errors import ConfigError


def test_they_differ_and_can_be_bound():
    found = ports.free_ports("127.0.0.1", 8)
    assert len(set(found)) == 8
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_what_is_held_is_given_to_nobody_else(monkeypatch):
    with ports.held_ports("127.0.0.1", 1) as (held,):
        monkeypatch.setattr(ports, "_server_ports", lambda: [held])
        assert ports.free_ports("127.0.0.1", 1) != (held,)
    assert ports.free_ports("127.0.0.1", 1) == (held,)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::", marks=needs_ipv6)])
async def test_a_server_listens_where_the_port_is_held_for_it(host):
    with ports.held_ports(host, 1) as (port,):
        for _ in range(2):  # and again after it was down
            ports.listen(host, port).close()
            server = grpc.aio.server()
            assert server.add_insecure_port(ports.host_port(host, port)) == port
            await server.start()
            await server.stop(None)


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


@pytest.mark.parametrize(
    ("host", "written"),
    [("10.0.0.1", "10.0.0.1:7"), ("d0.svc", "d0.svc:7"), ("fd00::1", "[fd00::1]:7"), ("[::]", "[::]:7")],
)
def test_an_address_of_ipv6_stands_in_brackets(host, written):
    assert ports.host_port(host, 7) == written


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_every_address_is_those_of_both_families(host):
    with ports.listen(host, 0) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), 5.0).close()
        (found,) = ports.free_ports(host, 1)
        assert found != port


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_what_is_written_to_a_connection_waits_for_no_acknowledgement(host):
    with ports.listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2], 5.0):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@needs_ipv6
def test_an_address_of_ipv6_is_that_one_alone():
    # The port is held at IPv4's address, too: another process may listen there on what the kernel gives.
    with ports.held_ports("127.0.0.1", 1) as (port,), ports.listen("::1", port):
        socket.create_connection(("::1", port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5.0)


def test_without_ipv6_every_address_is_ipv4_s(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with ports.listen("::", 0) as listener:
        assert listener.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5.0).close()
    assert ports.bindable("::1") == "::1"


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        ports.free_ports("192.0.2.1", 1)
