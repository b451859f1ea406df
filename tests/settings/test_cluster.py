"""TLS flags turn TLS on together, or the process refuses to start: never a silent plain text."""

from pathlib import Path

import pytest

from services.net.tls import TlsConfig
from services.router.config import RouterConfig
from services.settings.cluster import ClusterConfig
from services.values.errors import ConfigError

CA, CERT, KEY = Path("ca.pem"), Path("cert.pem"), Path("key.pem")


def test_without_a_tls_flag_there_is_none():
    assert ClusterConfig().tls() is None


def test_every_tls_flag_reaches_the_channels():
    config = ClusterConfig(tls_ca=CA, tls_cert=CERT, tls_key=KEY, tls_mutual=True, tls_server_name="rank")
    assert config.tls() == TlsConfig(CA, CERT, KEY, mutual=True, server_name="rank")


@pytest.mark.parametrize("flags", [{"tls_key": KEY}, {"tls_cert": CERT}, {"tls_mutual": True}], ids=str)
def test_half_of_tls_is_refused(flags):
    with pytest.raises(ConfigError):
        ClusterConfig(**flags).tls()


@pytest.mark.parametrize("flags", [{"tls_server_name": "rank"}, {"tls_ca": CA}], ids=str)
def test_a_server_without_a_certificate_is_refused(flags):
    with pytest.raises(ConfigError, match="certificate"):
        ClusterConfig(**flags).tls().for_server()


@pytest.mark.parametrize("flags", [{"etcd_cert": CERT}, {"etcd_key": KEY}], ids=str)
def test_a_certificate_for_etcd_without_its_authority_is_refused(flags):
    with pytest.raises(ConfigError, match="--etcd-ca"):
        ClusterConfig(etcd=("localhost:2379",), **flags).etcd_settings()


def test_a_password_without_its_user_is_refused():
    with pytest.raises(ConfigError, match="--etcd-user"):
        ClusterConfig(etcd=("localhost:2379",), etcd_password_file=Path("password")).etcd_settings()


@pytest.mark.parametrize("flags", [{"index_block": 0}, {"chunk_size": -5}, {"max_attempts": 0}], ids=str)
def test_a_router_refuses_sizes_that_cannot_work(flags):
    """The first process of a cluster decides on its schema."""
    (name,) = flags
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be 1 or more"):
        RouterConfig(model="/m", **flags)
