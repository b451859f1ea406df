"""Free ports are free, differ, and cannot be taken by an outgoing connection."""

import socket
from pathlib import Path

import grpc.aio
import pytest

from net.ipv6 import needs_ipv6
from services.host import ports
from services.values.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::", marks=needs_ipv6)])
async def test_a_server_listens_where_the_port_is_held_for_it(host):
    with ports.held_ports(host, 1) as (port,):
        for _ in range(2):  # and again after it was down
            ports.listen(host, port).close()
            server = grpc.aio.server()
            assert server.add_insecure_port(ports.host_port(host, port)) == port
            await server.start()
            await server.stop(None)


def test_ports_that_are_given_are_free(subtests, monkeypatch):
    with subtests.test("they differ and can be bound"):
        found = ports.free_ports("127.0.0.1", 8)
        assert len(set(found)) == 8
        for port in found:
            socket.create_server(("127.0.0.1", port)).close()
    with subtests.test("what is held is given to nobody else"), monkeypatch.context() as patch:
        with ports.held_ports("127.0.0.1", 1) as (held,):
            patch.setattr(ports, "_server_ports", lambda: [held])
            assert ports.free_ports("127.0.0.1", 1) != (held,)
        assert ports.free_ports("127.0.0.1", 1) == (held,)
    with subtests.test("the kernel gives them to nobody"):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        if not ports._server_ports():
            pytest.skip("here the kernel has taken every port for itself")
        assert not [port for port in ports.free_ports("127.0.0.1", 50) if first <= port <= last]
    with (
        subtests.test("taken ports are passed over"),
        monkeypatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        patch.setattr(ports, "_server_ports", lambda: [taken.getsockname()[1]])
        (found,) = ports.free_ports("127.0.0.1", 1)
        assert found != taken.getsockname()[1]


@needs_ipv6
def test_every_address_is_those_of_both_families(subtests):
    for host in ["::", "[::]"]:
        with subtests.test(host=host), ports.listen(host, 0) as listener:
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


def test_addresses(subtests, monkeypatch):
    for host, written in [
        ("10.0.0.1", "10.0.0.1:7"),
        ("d0.svc", "d0.svc:7"),
        ("fd00::1", "[fd00::1]:7"),
        ("[::]", "[::]:7"),
    ]:
        with subtests.test("an address of ipv6 stands in brackets", host=host, written=written):
            assert ports.host_port(host, 7) == written
    with subtests.test("without ipv6 every address is ipv4 s"), monkeypatch.context() as patch:
        patch.setattr(socket, "has_dualstack_ipv6", lambda: False)
        with ports.listen("::", 0) as listener:
            assert listener.family == socket.AF_INET
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5.0).close()
        assert ports.bindable("::1") == "::1"
    with (
        subtests.test("an address of another machine is refused"),
        pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"),
    ):
        ports.free_ports("192.0.2.1", 1)
