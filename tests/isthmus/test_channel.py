"""A router under TLS, for both clients."""

import asyncio

import pytest

from isthmus import AsyncClient, Client, Retries, Tls, Unavailable
from net.certificates import make_certificates
from router.scripted_router import ScriptedRouter, finished, serving
from services.net.channels import TlsConfig

NAME = "router.isthmus.internal"
ONCE = Retries(attempts=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("by-name"), f"DNS:{NAME}")


async def test_both_sides_show_who_they_are(folder):
    files = (folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    router = ScriptedRouter([finished("Hello", 1)], [finished("Hello", 1)])
    async with serving(router, tls=TlsConfig(*files, mutual=True)) as target:
        with Client(target, tls=Tls(*files, server_name=NAME), timeout=20) as client:
            assert (await asyncio.to_thread(client.generate, "Hi")).text == "Hello"
        async with AsyncClient(target, tls=Tls(*map(str, files), server_name=NAME), timeout=20) as client:
            assert (await client.generate("Hi")).text == "Hello"
        # Of another name, without a certificate, by authorities that did not sign it, without TLS.
        wrong = [Tls(*files), Tls(files[0], server_name=NAME), True, False]
        for tls in wrong:
            with Client(target, tls=tls, retries=ONCE, timeout=20) as client, pytest.raises(Unavailable):
                await asyncio.to_thread(client.generate, "Hi")
    assert len(router.requests) == 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"none\.pem"):
        Client(tls=Tls(ca=tmp_path / "none.pem"))
