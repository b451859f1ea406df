"""Flags of a rank, and what its engine is told by them."""

import math

import pytest

from services.decode.decode_service import decode_roles
from services.engine.paged.shell.decode_engine import PagedDecodeEngine
from services.engine.paged.shell.paged_engine import PagedEngine
from services.prefill.prefill_service import prefill_roles
from services.process.supervisor import rank_commands
from services.rank import main as rank_main
from services.rank.main import own_rank_id
from services.rank.rank_config import RankConfig
from services.settings.flags import load, to_flags
from services.transfer.nixl_settings import NixlSettings
from services.values.errors import ConfigError
from services.values.rank import Plan, Role
from services.values.rank_reports import (
    LENDS,
    NO_CACHE,
    NO_CHECKPOINTS,
    NO_MOVED_PENALTIES,
    NO_TENANT_TURNS,
    PULLS,
    REMOTE_ONLY,
)

MUTUAL = ("--tls-ca=ca", "--tls-cert=c", "--tls-key=k", "--tls-mutual")


def config_of(*flags):
    return load(RankConfig, ["--worker=w", "--engine=fake", "--etcd=e:1", *flags])


def test_flags_reach_the_engine(subtests):
    with subtests.test("each role has its own cache switch"):
        config = config_of("--decode-cache=off")
        assert not config.has_cache(Role.DECODE)
        assert config.has_cache(Role.PREFILL)
        assert not config_of("--prefill-cache=off").has_cache(Role.PREFILL)
    with subtests.test("the target for the time between tokens is decodes"):
        config = config_of("--itl-target-ms=40")
        assert config.limits(Role.DECODE).itl_target_s == 0.040
        assert config.limits(Role.PREFILL).itl_target_s is None
        assert config_of().limits(Role.DECODE).itl_target_s is None
    with subtests.test("the protected share reaches the engine"):
        assert config_of("--protected-cache-share=0.5").cache(Role.DECODE).protected_share == 0.5
    with subtests.test("the share of transfers that are checked reaches the engine"):
        assert config_of("--kv-digest-share=0.25").kv_digest_share == 0.25
    with subtests.test("what nixl is told reaches the engine"):
        flags = (
            "--nixl-backend=LIBFABRIC",
            "--nixl-parameter=a=1",
            "--nixl-parameter=b=x,y",
            "--expect-kv-path=rdma",
        )
        nixl = config_of(*flags).nixl
        assert nixl == NixlSettings("LIBFABRIC", {"a": "1", "b": "x,y"}, expects_rdma=True)
        assert config_of().nixl == NixlSettings("UCX", {})
    with subtests.test("the limit of a step reaches the engine"):
        assert config_of("--step-limit-s=7").limits(Role.PREFILL).step_limit_s == 7


def test_ranks_ask_for_the_services_name_where_tls_is_mutual():
    files = ("--tls-ca=ca", "--tls-cert=c", "--tls-key=k", "--tls-server-name=ranks")
    assert config_of(*files).tls().peer_name == ""
    assert config_of(*files, "--tls-mutual").tls().peer_name == "ranks"
    assert config_of(*files, "--tls-mutual", "--tls-peer-name=services").tls().peer_name == "services"
    with pytest.raises(ConfigError, match="--tls-peer-name needs --tls-mutual"):
        config_of(*files, "--tls-peer-name=services").tls()


def test_ranks_that_obey_strangers_say_so_once(subtests, caplog):
    for flags, warning in [
        ((), None),
        (("--host=::1",), None),
        (("--host=localhost",), None),
        (("--host=0.0.0.0", "--advertise-host=a"), "whoever reaches these ranks can"),
        (("--host=192.0.2.7", "--tls-cert=c", "--tls-key=k"), "whoever reaches these ranks can"),
        (("--host=192.0.2.7", *MUTUAL), "any certificate of --tls-ca's can"),
        (("--host=192.0.2.7", *MUTUAL, "--tls-peer-name=n"), None),
    ]:
        with subtests.test(flags=flags, warning=warning):
            caplog.clear()
            rank_main._warn_of_strangers(config_of(*flags))
            lines = [record.getMessage() for record in caplog.records]
            assert len(lines) == (warning is not None)
            assert warning is None or (lines[0].startswith("ranks_open host=") and warning in lines[0])


PULL = (LENDS, PULLS)


def test_a_rank_says_what_it_can_do_and_what_it_lacks_to_the_routers(subtests, monkeypatch):
    with subtests.test("a rank without a cache says so to the routers"):
        without = config_of("--decode-cache=off", "--prefill-cache=off")
        for make_roles in (decode_roles, prefill_roles):
            for config, expected in (
                (without, (NO_CACHE,)),
                (config_of(), PULL),
                (config_of("--pull=off"), ()),
            ):
                (role,) = make_roles(config, [own_rank_id(config)])
                assert role.capabilities == expected
    with subtests.test("a rank says what its engine lacks"), monkeypatch.context() as patched:
        patched.setattr(PagedDecodeEngine, "plans", frozenset({Plan.REMOTE}))
        patched.setattr(PagedDecodeEngine, "moves_penalties", False)
        (role,) = decode_roles(config_of(), [own_rank_id(config_of())])
        assert role.capabilities == (*PULL, REMOTE_ONLY, NO_MOVED_PENALTIES)
    with (
        subtests.test("a rank whose engine does not say where it can go on says that"),
        monkeypatch.context() as patched,
    ):
        patched.setattr(PagedEngine, "reports_checkpoints", False)
        for make_roles in (decode_roles, prefill_roles):
            (role,) = make_roles(config_of(), [own_rank_id(config_of())])
            assert role.capabilities == (*PULL, NO_CHECKPOINTS)
    with (
        subtests.test("a rank whose engine lets no tenants take turns says that"),
        monkeypatch.context() as patched,
    ):
        patched.setattr(PagedEngine, "takes_turns", False)
        for make_roles in (decode_roles, prefill_roles):
            (role,) = make_roles(config_of(), [own_rank_id(config_of())])
            assert role.capabilities == (*PULL, NO_TENANT_TURNS)


def test_what_cannot_work_is_refused(subtests):
    for changes in [
        {"itl_target_ms": 0.0},
        {"itl_target_ms": 40.0, "engine": "sglang", "model": "m"},
        {"shorter_first": -1.0},
        {"shorter_first": math.inf},
        {"shorter_first": 3.0, "engine": "sglang", "model": "m"},
        {"protected_cache_share": 0.5, "engine": "sglang", "model": "m"},
        {"write_lease_s": 2.0, "engine": "sglang", "model": "m"},
        {"fence_margin_s": 2.0, "engine": "sglang", "model": "m"},
        {"kv_digest_share": 1.0, "engine": "sglang", "model": "m"},
        {"kv_tier": ("memory:1MiB",), "engine": "sglang", "model": "m"},
        {"kv_tier": ("memory:1MiB", "memory:2MiB")},
        {"kv_tier": ("/tiers:1MiB", "/tiers/:2MiB")},
        {"kv_tier": ("memory",)},
        {"kv_tier": ("memory:1MiB",), "kv_tier_write_mbps": 1.0},
        {"kv_tier": ("/tiers:1MiB",), "kv_tier_write_mbps": 0.0},
        {"kv_tier": ("memory:1MiB",), "kv_tier_shared": "on"},
        {"worker": "../elsewhere"},
        {"pull": "off", "engine": "sglang", "model": "m"},
        {"protected_cache_share": 1.5},
        {"device": "cuda:1", "dp_size": 2, "engine": "torch", "model": "m"},
        {"device": "cuda:0", "dp_size": 2, "engine": "torch", "model": "m"},
        {"kv_digest_share": -0.1},
        {"step_limit_s": -1.0},
        {"step_limit_s": 60.0, "engine": "sglang", "model": "m"},
        {"kv_digest_share": 1.1},
        {"metrics_port": 70000},
        {"health_port": -1},
        {"restart_timeout_s": 0.0},
        {"nixl_parameter": ("a=1", "a=2")},
        {"nixl_backend": "LIBFABRIC", "transport": "local"},
        {"nixl_parameter": ("num_workers=1",), "transport": "local"},
        {"nixl_parameter": ("ucx_devices=mlx5_0:1",)},
        {"port": 65535, "dp_size": 2},
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": ""},
        {"host": "10.0.0.1", "advertise_host": "0.0.0.0"},
    ]:
        with subtests.test(changes=changes), pytest.raises(ConfigError, match="--"):
            RankConfig(**{"worker": "w", "engine": "fake", "etcd": ("e:1",), **changes})


def test_addresses_and_ports_of_a_rank(subtests):
    with subtests.test("who listens on every address says which one to call"):
        config = config_of("--host=0.0.0.0", "--advertise-host=10.0.0.1")
        assert config.reached_at == "10.0.0.1"
    with subtests.test("the last rank may have the last port"):
        assert config_of("--port=65534", "--dp-size=2").port == 65534
        assert config_of("--port=65535", "--dp-size=2", "--rank-index=1").port == 65535


def test_gpus_of_a_worker(subtests):
    for flags, device in [
        (["--engine=torch", "--device=cuda", "--dp-size=2", "--rank-index=0"], "cuda:0"),
        (["--engine=torch", "--device=cuda", "--dp-size=2", "--rank-index=1"], "cuda:1"),
        (["--engine=torch", "--device=cuda", "--rank-index=0"], "cuda"),
        (["--engine=torch", "--device=cuda:3", "--rank-index=0"], "cuda:3"),
        (["--engine=torch", "--device=cpu", "--dp-size=2", "--rank-index=1"], "cpu"),
        (["--engine=sglang", "--device=cuda", "--dp-size=2", "--rank-index=1"], "cuda"),
        (["--engine=sglang", "--device=cuda:4", "--dp-size=2", "--rank-index=1"], "cuda:4"),
    ]:
        with subtests.test(flags=flags, device=device):
            assert config_of("--model=m", *flags).rank_device == device
    with subtests.test("the processes of a worker take its gpus in turn"):
        # As the supervisor starts them: with its own flags, and each with its index.
        worker = config_of("--engine=torch", "--model=m", "--device=cuda", "--dp-size=3")
        commands = rank_commands("services.decode", to_flags(worker), {"port": (1, 2, 3)})
        ranks = [load(RankConfig, command[3:]) for command in commands]
        assert [rank.rank_device for rank in ranks] == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_tier_of_what_is_not_cached_is_refused():
    config = config_of("--kv-tier=memory:1MiB", "--decode-cache=off")
    assert config.cache(Role.PREFILL).tiers.places
    with pytest.raises(ConfigError, match="--decode-cache"):
        config.cache(Role.DECODE)
