import asyncio
import subprocess
from pathlib import Path

import pytest

from etcd.etcd_users import require_users
from etcd.real_etcd import FAST, client
from net import certificates as shared
from services.etcd.connection import EtcdSettings
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import (
    _RANGE,
    Etcd,
    delete_range_op,
    known_fault,
    prefix_end,
    put_op,
    unchanged,
    warn_of_version,
)
from services.etcd.etcd_errors import EtcdCompacted, EtcdNoSpace, LeaseNotFound
from services.etcd.watch import PrefixWatch
from services.index.keys import ClusterKeys
from services.net.channels import TlsConfig
from services.values.errors import ConfigError, ProtocolError, Unavailable
from services.wire.etcd import etcd_pb2


def test_settings_of_endpoints(subtests: pytest.Subtests) -> None:
    with subtests.test("prefix end is the first key past the prefix"):
        assert prefix_end(b"a/") == b"a0"
        assert prefix_end(b"a\xff\xff") == b"b"
        assert prefix_end(b"\xff") == b"\0"
    for endpoint, tls, message in [
        ("etcd", False, "HOST:PORT"),
        ("https://etcd:2379", False, "without a CA"),
        ("http://e:1", True, "with a CA"),
    ]:
        with (
            subtests.test(endpoint=endpoint, tls=tls, message=message),
            pytest.raises(ConfigError, match=message),
        ):
            EtcdSettings((endpoint,), tls=TlsConfig(Path("ca.pem")) if tls else None)
    with subtests.test("settings hide the password and strip the scheme"):
        settings = EtcdSettings(("http://etcd:2379/", "[::1]:2379"), user="u", password="hush")
        assert settings.endpoints == ("etcd:2379", "[::1]:2379")
        assert "hush" not in repr(settings)


async def test_keys_are_put_created_swapped_and_changed_all_or_nothing(etcd: Etcd, keys: ClusterKeys) -> None:
    key = keys.prefix + b"a"
    assert await etcd.get(key) is None
    revision = await etcd.put(key, b"1")
    found = await etcd.get(key)
    assert found is not None and (found.value, found.mod_revision) == (b"1", revision)
    created = keys.prefix + b"created"
    assert await etcd.create(created, b"1")
    assert not await etcd.create(created, b"2")
    found = await etcd.get(created)
    assert found is not None and found.value == b"1"
    assert await etcd.compare_and_swap(created, b"3", found.mod_revision)
    assert not await etcd.compare_and_swap(created, b"4", found.mod_revision)
    a, b = keys.prefix + b"txn/a", keys.prefix + b"txn/b"
    await etcd.put(a, b"old")
    refused = await etcd.txn([unchanged(a, 0)], [delete_range_op(a, b)], [put_op(b, b"else")])
    assert not refused.succeeded
    _, kvs = await etcd.snapshot(keys.prefix + b"txn/")
    assert [(kv.key, kv.value) for kv in kvs] == [(a, b"old"), (b, b"else")]


async def test_a_snapshot_of_many_pages_is_of_one_revision(etcd: Etcd, keys: ClusterKeys) -> None:
    names = [keys.prefix + b"%03d" % number for number in range(25)]
    for name in names:
        await etcd.put(name, b"1")
    listing = asyncio.create_task(etcd.snapshot(keys.prefix, page_keys=2))
    while not listing.done():
        await etcd.txn([], [put_op(name, b"2") for name in names])
    revision, kvs = await listing
    assert [kv.key for kv in kvs] == names
    assert len({kv.value for kv in kvs}) == 1
    assert max(kv.mod_revision for kv in kvs) <= revision


async def test_errors_are_ours(subtests: pytest.Subtests, etcd: Etcd, keys: ClusterKeys) -> None:
    with subtests.test("errors are ours"):
        with pytest.raises(LeaseNotFound):
            await etcd.put(keys.prefix + b"a", b"", lease_id=12345)
        with pytest.raises(LeaseNotFound):
            await etcd.revoke_lease(12345)
        with pytest.raises(ProtocolError, match="too many operations"):
            await etcd.txn([], [put_op(keys.prefix + b"%d" % number, b"") for number in range(129)])
    with subtests.test("no endpoint answers"):
        async with client("127.0.0.1:1", "localhost:2", timeout_s=0.3) as nowhere:
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1, localhost:2"):
                await nowhere.get(b"a")
    with subtests.test("a compacted revision has an error of its own"):
        first = await etcd.put(keys.prefix + b"a", b"1")
        await etcd.put(keys.prefix + b"a", b"2")
        await etcd.compact(await etcd.current_revision())
        with pytest.raises(EtcdCompacted):
            await etcd.connection.unary(_RANGE, etcd_pb2.RangeRequest(key=b"a", revision=first))


async def test_a_dead_endpoint_is_passed_over(
    subtests: pytest.Subtests, etcd_endpoint: str, keys: ClusterKeys
) -> None:
    for seed in range(3):
        with subtests.test(seed=seed):
            by_name = etcd_endpoint.replace("127.0.0.1", "localhost")
            async with client("127.0.0.1:1", by_name, seed=seed, timeout_s=3.0) as etcd:
                prefix = keys.prefix + b"%d/" % seed
                assert await etcd.create(prefix, b"1")  # not idempotent, and yet it may be tried elsewhere
                _, kvs = await etcd.snapshot(prefix)
                assert [kv.value for kv in kvs] == [b"1"]


async def test_a_stalled_endpoint_is_left_after_one_attempt(etcd_endpoint: str, keys: ClusterKeys) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    stalled = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    host, port = stalled.sockets[0].getsockname()
    async with stalled:
        for seed in range(2):  # whichever is tried first
            async with client(f"{host}:{port}", etcd_endpoint, seed=seed, connect_timeout_s=0.2) as etcd:
                assert await etcd.put(keys.prefix + b"a", b"1")


async def test_a_restart_costs_a_retry_and_no_error(own_server: EmbeddedEtcd) -> None:
    async with client(own_server.endpoint, timeout_s=15.0) as etcd:
        await etcd.put(b"a", b"1")
        await own_server.kill()
        reading = asyncio.create_task(etcd.get(b"a"))
        await own_server.start()
        found = await reading
        assert found is not None and found.value == b"1"


async def test_users_log_in_and_log_in_again(own_server: EmbeddedEtcd) -> None:
    async with client(own_server.endpoint, user="root", password="secret", timeout_s=15.0) as etcd:
        await etcd.put(b"early", b"")  # authentication is off yet: no token is needed
        require_users(own_server)
        await etcd.put(b"a", b"1")
        watch = PrefixWatch(etcd, b"a").batches()
        assert len((await anext(watch)).changes) == 1
        assert (await anext(watch)).complete
        await own_server.kill()  # etcd forgets its tokens
        await own_server.start()
        await etcd.put(b"a", b"2")
        assert (await anext(watch)).changes[0].value == b"2"
        await watch.aclose()
    async with client(own_server.endpoint, user="root", password="wrong", timeout_s=15.0) as etcd:
        with pytest.raises(ConfigError, match="authentication failed"):
            await etcd.get(b"a")


async def test_a_full_etcd_has_an_error_of_its_own(tmp_path: Path) -> None:
    small = (*FAST, "--quota-backend-bytes=500000")
    async with EmbeddedEtcd(tmp_path, extra_arguments=small) as server, client(server.endpoint) as etcd:
        with pytest.raises(EtcdNoSpace):
            for _ in range(300):  # etcd looks at what it has committed, and it commits from time to time
                await etcd.put(b"a", bytes(200_000))
        assert await etcd.get(b"a") is not None


def make_certificates(folder: Path) -> None:
    """An authority, a server's and a client's certificate."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-subj", "/CN=ca", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "ext", "-out", f"{name}.pem"),
        )


async def test_mutual_tls(tmp_path: Path, unused_tcp_port_factory) -> None:
    try:
        make_certificates(tmp_path)
    except FileNotFoundError:
        pytest.skip("needs the openssl command to make certificates")
    plain, secure = unused_tcp_port_factory(), unused_tcp_port_factory()
    arguments = (
        *FAST,
        f"--listen-client-urls=http://127.0.0.1:{plain},https://127.0.0.1:{secure}",
        f"--cert-file={tmp_path}/server.pem",
        f"--key-file={tmp_path}/server.key",
        f"--trusted-ca-file={tmp_path}/ca.pem",
        "--client-cert-auth",
    )
    ca, pair = tmp_path / "ca.pem", (tmp_path / "client.pem", tmp_path / "client.key")
    async with EmbeddedEtcd(tmp_path / "data", client_port=plain, extra_arguments=arguments):
        async with client(f"https://127.0.0.1:{secure}", tls=TlsConfig(ca, *pair, mutual=True)) as etcd:
            assert await etcd.create(b"a", b"1")
        async with client(f"127.0.0.1:{secure}", tls=TlsConfig(ca), timeout_s=0.5) as stranger:
            with pytest.raises(Unavailable):
                await stranger.get(b"a")
    with pytest.raises(ConfigError, match="cannot read the TLS file"):
        client("a:1", tls=TlsConfig(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="both"):
        client("a:1", tls=TlsConfig(ca, cert=ca))


async def test_an_etcd_that_comes_back_under_another_authority(
    tmp_path: Path, unused_tcp_port_factory
) -> None:
    """The client's files have changed with it: it needs no other client."""
    pems = [shared.make_certificates(tmp_path / name, "IP:127.0.0.1") for name in ("old", "new")]
    mounted = shared.Mounted(tmp_path / "mounted", pems[0])
    ca, cert, key = (mounted.folder / name for name in mounted.FILES)
    plain, secure = unused_tcp_port_factory(), unused_tcp_port_factory()
    arguments = (
        *FAST,
        f"--listen-client-urls=http://127.0.0.1:{plain},https://127.0.0.1:{secure}",
        *(f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca}", "--client-cert-auth"),
    )
    server = EmbeddedEtcd(tmp_path / "data", client_port=plain, extra_arguments=arguments)
    async with server, client(f"127.0.0.1:{secure}", tls=TlsConfig(ca, cert, key, mutual=True)) as etcd:
        assert await etcd.create(b"a", b"1")
        await server.kill()
        mounted.swap(pems[1])
        await server.start()
        assert await etcd.get(b"a") is not None


def test_versions_that_may_diverge(subtests: pytest.Subtests) -> None:
    for version in ["3.5.0", "3.5.1", "3.5.2", "3.5.2-rc.1"]:
        with subtests.test(version=version):
            assert "3.5.3" in str(known_fault(version))
    for version in ["3.4.23", "3.5.3", "3.5.10", "3.5.21", "3.6.0", "4.3.5.1", ""]:
        with subtests.test(version=version):
            assert known_fault(version) is None


async def test_only_of_several_members_the_log_is_warned(
    subtests: pytest.Subtests, etcd_endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    for members in [1, 2]:
        with subtests.test(members=members):
            async with client(*[etcd_endpoint] * members) as etcd:
                await warn_of_version(etcd)
            assert ("etcd_version_faulty version=3.5.1" in caplog.text) is (members > 1)
