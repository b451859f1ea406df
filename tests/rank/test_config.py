"""Flags of a rank, and what its engine is told by them."""

import pytest

from services.decode.role import decode_roles
from services.engine.paged.shell.decode import PagedDecodeEngine
from services.engine.paged.shell.engine import PagedEngine
from services.prefill.role import prefill_roles
from services.process.supervisor import rank_commands
from services.rank import main as rank_main
from services.rank.config import RankConfig
from services.rank.main import own_rank_id
from services.settings.flags import load, to_flags
from services.transfer.nixl_settings import NixlSettings
from services.values.errors import ConfigError
from services.values.rank import Plan, Role
from services.values.registration import (
    NO_CACHE,
    NO_MOVED_PENALTIES,
    NO_RESUME_POINTS,
    NO_TENANT_TURNS,
    PAIR_BLOCKS,
    REMOTE_ONLY,
)

MUTUAL = ("--tls-ca=ca", "--tls-cert=c", "--tls-key=k", "--tls-mutual")


def config_of(*flags):
    return load(RankConfig, ["--worker=w", "--engine=fake", "--etcd=e:1", *flags])


def test_each_role_has_its_own_cache_switch():
    config = config_of("--decode-cache=off")
    assert not config.has_cache(Role.DECODE)
    assert config.has_cache(Role.PREFILL)
    assert not config_of("--prefill-cache=off").has_cache(Role.PREFILL)


def test_the_target_for_the_time_between_tokens_is_decodes():
    config = config_of("--itl-target-ms=40")
    assert config.limits(Role.DECODE).itl_target_s == 0.040
    assert config.limits(Role.PREFILL).itl_target_s is None
    assert config_of().limits(Role.DECODE).itl_target_s is None


def test_the_protected_share_reaches_the_engine():
    assert config_of("--protected-cache-share=0.5").cache(Role.DECODE).protected_share == 0.5


def test_the_share_of_transfers_that_are_checked_reaches_the_engine():
    assert config_of("--kv-digest-share=0.25").kv_digest_share == 0.25


def test_what_nixl_is_told_reaches_the_engine():
    flags = (
        "--nixl-backend=LIBFABRIC",
        "--nixl-parameter=a=1",
        "--nixl-parameter=b=x,y",
        "--expect-kv-path=rdma",
    )
    nixl = config_of(*flags).nixl
    assert nixl == NixlSettings("LIBFABRIC", {"a": "1", "b": "x,y"}, expects_rdma=True)
    assert config_of().nixl == NixlSettings("UCX", {})


def test_ranks_ask_for_the_services_name_where_tls_is_mutual():
    files = ("--tls-ca=ca", "--tls-cert=c", "--tls-key=k", "--tls-server-name=ranks")
    assert config_of(*files).tls().peer_name == ""
    assert config_of(*files, "--tls-mutual").tls().peer_name == "ranks"
    assert config_of(*files, "--tls-mutual", "--tls-peer-name=services").tls().peer_name == "services"
    with pytest.raises(ConfigError, match="--tls-peer-name needs --tls-mutual"):
        config_of(*files, "--tls-peer-name=services").tls()


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ((), None),
        (("--host=::1",), None),
        (("--host=localhost",), None),
        (("--host=0.0.0.0", "--advertise-host=a"), "whoever reaches these ranks can"),
        (("--host=192.0.2.7", "--tls-cert=c", "--tls-key=k"), "whoever reaches these ranks can"),
        (("--host=192.0.2.7", *MUTUAL), "any certificate of --tls-ca's can"),
        (("--host=192.0.2.7", *MUTUAL, "--tls-peer-name=n"), None),
    ],
)
def test_ranks_that_obey_strangers_say_so_once(flags, warning, caplog):
    rank_main._warn_of_strangers(config_of(*flags))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (warning is not None)
    assert warning is None or (lines[0].startswith("ranks_open host=") and warning in lines[0])


def test_the_limit_of_a_step_reaches_the_engine():
    assert config_of("--step-limit-s=7").limits(Role.PREFILL).step_limit_s == 7


def test_a_rank_without_a_cache_says_so_to_the_routers():
    without = config_of("--decode-cache=off", "--prefill-cache=off")
    for make_roles in (decode_roles, prefill_roles):
        for config, expected in ((without, (NO_CACHE,)), (config_of(), ())):
            (role,) = make_roles(config, [own_rank_id(config)])
            assert role.capabilities == expected


def test_a_rank_says_what_its_engine_lacks(monkeypatch):
    monkeypatch.setattr(PagedDecodeEngine, "plans", frozenset({Plan.REMOTE}))
    monkeypatch.setattr(PagedDecodeEngine, "moves_penalties", False)
    (role,) = decode_roles(config_of(), [own_rank_id(config_of())])
    assert role.capabilities == (REMOTE_ONLY, NO_MOVED_PENALTIES)


def test_a_rank_whose_engine_does_not_say_where_it_can_go_on_says_that(monkeypatch):
    monkeypatch.setattr(PagedEngine, "tells_resume_points", False)
    for make_roles in (decode_roles, prefill_roles):
        (role,) = make_roles(config_of(), [own_rank_id(config_of())])
        assert role.capabilities == (NO_RESUME_POINTS,)


def test_a_rank_whose_engine_lets_no_tenants_take_turns_says_that(monkeypatch):
    monkeypatch.setattr(PagedEngine, "takes_turns", False)
    for make_roles in (decode_roles, prefill_roles):
        (role,) = make_roles(config_of(), [own_rank_id(config_of())])
        assert role.capabilities == (NO_TENANT_TURNS,)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_rank_registers_what_its_started_engine_says_of_its_blocks(monkeypatch, pairs):
    (role,) = decode_roles(config_of("--decode-cache=off"), [own_rank_id(config_of())])
    monkeypatch.setattr(PagedEngine, "tells_pairs", pairs)
    for name in ("layout", "max_context_tokens", "model_context_tokens"):
        monkeypatch.setattr(type(role.engine), name, None)
    registered = rank_main._registration(config_of(), role, None)
    assert registered.capabilities == (NO_CACHE, PAIR_BLOCKS)[: 1 + pairs]


@pytest.mark.parametrize(
    "changes",
    [
        {"itl_target_ms": 0.0},
        {"itl_target_ms": 40.0, "engine": "sglang", "model": "m"},
        {"protected_cache_share": 0.5, "engine": "sglang", "model": "m"},
        {"write_lease_s": 2.0, "engine": "sglang", "model": "m"},
        {"fence_margin_s": 2.0, "engine": "sglang", "model": "m"},
        {"kv_digest_share": 1.0, "engine": "sglang", "model": "m"},
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
    ],
)
def test_what_cannot_work_is_refused(changes):
    with pytest.raises(ConfigError, match="--"):
        RankConfig(**{"worker": "w", "engine": "fake", "etcd": ("e:1",), **changes})


def test_who_listens_on_every_address_says_which_one_to_call():
    config = config_of("--host=0.0.0.0", "--advertise-host=10.0.0.1")
    assert config.reached_at == "10.0.0.1"


def test_the_last_rank_may_have_the_last_port():
    assert config_of("--port=65534", "--dp-size=2").port == 65534
    assert config_of("--port=65535", "--dp-size=2", "--rank-index=1").port == 65535


@pytest.mark.parametrize(
    ("flags", "device"),
    [
        (["--engine=torch", "--device=cuda", "--dp-size=2", "--rank-index=0"], "cuda:0"),
        (["--engine=torch", "--device=cuda", "--dp-size=2", "--rank-index=1"], "cuda:1"),
        (["--engine=torch", "--device=cuda", "--rank-index=0"], "cuda"),
        (["--engine=torch", "--device=cuda:3", "--rank-index=0"], "cuda:3"),
        (["--engine=torch", "--device=cpu", "--dp-size=2", "--rank-index=1"], "cpu"),
        (["--engine=sglang", "--device=cuda", "--dp-size=2", "--rank-index=1"], "cuda"),
        (["--engine=sglang", "--device=cuda:4", "--dp-size=2", "--rank-index=1"], "cuda:4"),
    ],
)
def test_each_rank_of_a_worker_has_a_gpu_of_its_own(flags, device):
    assert config_of("--model=m", *flags).rank_device == device


def test_the_processes_of_a_worker_take_its_gpus_in_turn():
    """As the supervisor starts them: with its own flags, and each with its index."""
    worker = config_of("--engine=torch", "--model=m", "--device=cuda", "--dp-size=3")
    commands = rank_commands("services.decode", to_flags(worker), {"port": (1, 2, 3)})
    ranks = [load(RankConfig, command[3:]) for command in commands]
    assert [rank.rank_device for rank in ranks] == ["cuda:0", "cuda:1", "cuda:2"]
