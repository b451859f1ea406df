from dataclasses import replace
from pathlib import Path

import pytest

from net.certificates import make_certificates
from net.echo import NAMES, Service, call, serving
from services.net import channels, servers
from services.net.channels import TlsConfig
from services.values import errors


@pytest.fixture(scope="module")
def pem(tmp_path_factory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("pem"), "DNS:localhost")


async def test_a_server_is_known_by_the_name_that_it_was_given(tmp_path):
    folder = make_certificates(tmp_path, "DNS:ranks.isthmus")
    tls = TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    async with serving(Service(), tls, replace(tls, server_name="ranks.isthmus")) as (server, channel):
        assert (await call(channel)).found
        for other in ("", "others.isthmus"):
            other_tls = replace(tls, server_name=other)
            async with channels.open_channel(f"localhost:{server.port}", other_tls) as stranger:
                with pytest.raises(errors.PeerFailed):
                    await call(stranger)


async def test_tls_of_one_side_and_of_both(subtests, pem):
    with subtests.test("tls serves those who trust the ca"):
        server_tls = TlsConfig(cert=pem / "cert.pem", key=pem / "key.pem")
        async with serving(Service(), server_tls, TlsConfig(ca=pem / "ca.pem")) as (server, channel):
            assert (await call(channel)).found
            async with channels.open_channel(f"localhost:{server.port}") as plain:
                with pytest.raises(errors.PeerFailed):
                    await call(plain)
    with subtests.test("mutual tls refuses a client without a certificate"):
        tls = TlsConfig(pem / "ca.pem", pem / "cert.pem", pem / "key.pem", mutual=True)
        async with serving(Service(), tls, tls) as (server, channel):
            assert (await call(channel)).found
            async with channels.open_channel(
                f"localhost:{server.port}", TlsConfig(ca=pem / "ca.pem")
            ) as anonymous:
                with pytest.raises(errors.PeerFailed):
                    await call(anonymous)


async def test_settings_and_files_that_cannot_be(subtests, tmp_path_factory):
    for fields in [
        {"cert": Path("c")},
        {"key": Path("k")},
        {"ca": Path("ca"), "mutual": True},
        {"cert": Path("c"), "key": Path("k"), "mutual": True},
        {"peer_name": "n"},
        {"client_ca": Path("ca")},
    ]:
        with subtests.test("half a tls config is refused", fields=fields), pytest.raises(errors.ConfigError):
            TlsConfig(**fields)
    with subtests.test("a missing pem file is named"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(errors.ConfigError, match=r"none\.pem"):
            channels.open_channel("localhost:1", TlsConfig(ca=tmp_path / "none.pem"))
    with subtests.test("an unreadable certificate is refused"):
        tmp_path = tmp_path_factory.mktemp("case")
        broken = tmp_path / "broken.pem"
        broken.write_text("nothing")
        with pytest.raises(errors.ConfigError, match=r"broken\.pem"):
            await servers.open_server(
                "localhost:0", lambda _: None, NAMES, TlsConfig(cert=broken, key=broken)
            )
