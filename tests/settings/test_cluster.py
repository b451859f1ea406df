"""TLS flags turn TLS on together, or the process refuses to start: never a silent plain text."""

from pathlib import Path

import pytest

from services.net.channels import TlsConfig
from services.router.router_config import RouterConfig
from services.settings.cluster_config import ClusterConfig
from services.values.errors import ConfigError

CA, CERT, KEY = Path("ca.pem"), Path("cert.pem"), Path("key.pem")


def test_flags_of_tls_and_etcd(subtests):
    with subtests.test("without a tls flag there is none"):
        assert ClusterConfig().tls() is None
    with subtests.test("every tls flag reaches the channels"):
        config = ClusterConfig(tls_ca=CA, tls_cert=CERT, tls_key=KEY, tls_mutual=True, tls_server_name="rank")
        assert config.tls() == TlsConfig(CA, CERT, KEY, mutual=True, server_name="rank")
    for flags in [{"tls_key": KEY}, {"tls_cert": CERT}, {"tls_mutual": True}]:
        with subtests.test("half of tls is refused", flags=flags), pytest.raises(ConfigError):
            ClusterConfig(**flags).tls()
    for flags in [{"tls_server_name": "rank"}, {"tls_ca": CA}]:
        with (
            subtests.test("a server without a certificate is refused", flags=flags),
            pytest.raises(ConfigError, match="certificate"),
        ):
            ClusterConfig(**flags).tls().for_server()
    for flags in [{"etcd_cert": CERT}, {"etcd_key": KEY}]:
        with (
            subtests.test("a certificate for etcd without its authority is refused", flags=flags),
            pytest.raises(ConfigError, match="--etcd-ca"),
        ):
            ClusterConfig(etcd=("localhost:2379",), **flags).etcd_settings()
    with (
        subtests.test("a password without its user is refused"),
        pytest.raises(ConfigError, match="--etcd-user"),
    ):
        ClusterConfig(etcd=("localhost:2379",), etcd_password_file=Path("password")).etcd_settings()


def test_a_router_refuses_sizes_that_cannot_work(subtests):
    """The first process of a cluster decides on its schema."""
    for flags in [{"index_block": 0}, {"chunk_size": -5}, {"max_attempts": 0}]:
        with subtests.test(flags=flags):
            (name,) = flags
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be 1 or more"):
                RouterConfig(model="/m", **flags)
