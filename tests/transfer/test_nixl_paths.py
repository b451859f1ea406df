"""These tests show what NIXL is told, and what it tells: in a process of its own, for UCX reads its
environment once."""

import json
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace

import pytest

import services
from services.kv.transfer_plan import PageMove
from services.transfer.nixl_settings import NixlSettings, check_parameters, keep_to_loopback, parameters_of
from services.transfer.open_transport import open_transport
from services.values.errors import ConfigError
from services.values.kv import KvPath, KvPathKind

SCRIPT = Path(__file__).parent / "told_paths.py"


def with_ours(**environment):
    return {**os.environ, **environment, "PYTHONPATH": str(Path(services.__file__).parents[1])}


def told(**environment):
    result = subprocess.run(
        [sys.executable, SCRIPT], env=with_ours(**environment), capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_where_the_host_is_loopback_ucx_has_it_alone(subtests):
    for host, set_before, devices in [
        ("127.0.0.1", None, "lo"),
        ("[::1]", None, "lo"),
        ("localhost", None, "lo"),
        ("127.0.0.1", "mlx5_0:1", "mlx5_0:1"),
        ("0.0.0.0", None, None),
        ("::", None, None),
        ("192.0.2.7", None, None),
        ("a.host", None, None),
    ]:
        with (
            subtests.test(host=host, set_before=set_before, devices=devices),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setattr(os, "environ", {} if set_before is None else {"UCX_NET_DEVICES": set_before})
            keep_to_loopback(host)
            assert os.environ.get("UCX_NET_DEVICES") == devices


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("tls", "kind", "level"),
    [
        ("self,sm,cma,tcp", "shared_memory", "INFO"),
        pytest.param("tcp", "tcp", "WARNING", marks=pytest.mark.long),
    ],
)
def test_the_way_is_told_once_something_has_landed(tls, kind, level):
    answer, log = told(UCX_TLS=tls)
    assert (answer["before"], answer["landed"]) == ([], True)
    assert answer["path"][:2] == [kind, "intra-node"]
    lines = [line for line in log.splitlines() if "kv_path" in line]
    assert len(lines) == 1  # not one a write
    assert lines[0].startswith(f"{level} kv_path kind={kind} reach=intra-node lanes='{answer['path'][2]}'")
    # As UCX has them by itself: children could not open the file.
    assert answer["inherited"] == {"UCX_LOG_FILE": "", "UCX_PROTO_INFO": "n"}
    assert answer["is_left_alone"]  # the environment, which other threads may be reading


@pytest.mark.nixl
@pytest.mark.long
def test_who_has_ucx_write_elsewhere_is_told_nothing(tmp_path):
    answer, _ = told(UCX_TLS="tcp", UCX_LOG_FILE=str(tmp_path / "ucx-%p.log"), UCX_PROTO_INFO="y")
    assert (answer["path"], answer["landed"]) == (None, True)
    assert any("tcp/" in file.read_text() for file in tmp_path.glob("*.log"))


@pytest.mark.nixl
def test_a_backend_that_nixl_has_not_is_refused_with_those_that_it_has():
    with pytest.raises(
        ConfigError, match=r"--nixl-backend=MOONCAKE: NIXL has no such plugin here, but .*UCX"
    ):
        open_transport("nixl", NixlSettings(backend="MOONCAKE"))


@pytest.mark.nixl
@pytest.mark.skipif(find_library("fabric") is not None, reason="libfabric is installed here")
def test_a_plugin_that_is_there_and_cannot_be_loaded_is_refused_with_what_it_lacks(tmp_path):
    """NIXL's list of plugins is of files. The wheel's LIBFABRIC wants a library that the wheel has not."""
    with pytest.raises(
        ConfigError, match=r"--nixl-backend=LIBFABRIC: NIXL brings this plugin, but .*libfabric"
    ):
        open_transport("nixl", NixlSettings(backend="LIBFABRIC"))


@pytest.mark.nixl
@pytest.mark.long
def test_an_import_of_nixl_leaves_the_processs_logging_as_it_was():
    code = (
        "import logging, services.transfer.nixl as door; door.open_agent('a');"
        "print(logging.raiseExceptions, logging.getLogger('nixl').handlers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=with_ours(), capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "True []\n", done.stderr


@pytest.mark.nixl
@pytest.mark.long
@pytest.mark.parametrize(
    ("exporter", "said"),
    [("BUFFER", "open"), ("prometheus", "open"), ("none_such", "ConfigError: cannot start")],
)
def test_telemetry_of_nixls_ends_no_rank(exporter, said, tmp_path):
    code = (
        "import sys, services.transfer.nixl as door\n"
        "try: door.open_agent('a'); print('open')\n"
        "except Exception as error: print(f'{type(error).__name__}: {error}')"
    )
    told = {
        "NIXL_TELEMETRY_ENABLE": "y",
        "NIXL_TELEMETRY_DIR": str(tmp_path),
        "NIXL_TELEMETRY_EXPORTER": exporter,
        "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=with_ours(**told), capture_output=True, text=True, timeout=100
    )
    assert done.stdout.startswith(said), done.stderr


def test_a_missing_wheel_of_nixl_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "services.transfer.nixl", raising=False)
    finder = SimpleNamespace(find_spec=refusing("detected CUDA 13 but nixl-cu13 is not installed"))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(ConfigError, match=r"built for CUDA 13, .* Install nixl-cu13 of nixl's version"):
        open_transport("nixl")


def refusing(sentence):
    def find_spec(name, *_):
        if name == "services.transfer.nixl":
            raise ImportError(sentence)

    return find_spec


def test_parameters_that_are_refused(subtests):
    for parameters, refusal in [
        (["device_list", "num_workers", "engine_config"], None),
        (["ucx_devices"], "ucx_devices=...: NIXL names this parameter and never reads it; device_list says"),
        (
            ["nonsense"],
            r"nonsense=...: NIXL's plugin UCX has no such parameter, but device_list, engine_config, ",
        ),
    ]:
        with subtests.test(
            "a parameter that nobody reads is refused", parameters=parameters, refusal=refusal
        ):
            if refusal is None:
                check_parameters("UCX", parameters)
                continue
            with pytest.raises(ConfigError, match=refusal):
                check_parameters("UCX", parameters)

    with subtests.test("parameters are names and values"):
        assert parameters_of(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
        with pytest.raises(ConfigError, match="a is given twice"):
            parameters_of(["a=1", "a=2"])


@pytest.mark.nixl
def test_a_parameter_reaches_the_backend():
    refusal = "--nixl-backend=UCX cannot start with --nixl-parameter ucx_error_handling_mode=whatever"
    with pytest.raises(ConfigError, match=refusal):
        open_transport("nixl", NixlSettings(parameters={"ucx_error_handling_mode": "whatever"}))
    open_transport("nixl", NixlSettings(parameters={"num_workers": "2"})).close()


@pytest.mark.nixl
def test_a_thread_that_sleeps_through_what_comes_sleeps_briefly(monkeypatch):
    from services.transfer import nixl

    pauses_us = []
    monkeypatch.setattr(nixl._bindings, "nixlAgent", lambda _, config: pauses_us.append(config.pthrDelay))
    for settings in (
        NixlSettings("UCX", writes=True),
        NixlSettings("LIBFABRIC", writes=True),
        NixlSettings(),
    ):
        nixl.let_sleep(SimpleNamespace(name="its"), settings, one_thread=True)
    who_writes, of_libfabric, who_listens = pauses_us
    assert who_writes > of_libfabric == who_listens == 1000


def test_the_local_transport_knows_its_way(make_pool):
    pool = make_pool(4, 512, seed=1)
    transport = open_transport("local")
    transport.register([pool.memory], [512])
    assert transport.paths == ()
    peer = transport.add_peer(transport.metadata(), [pool.memory])
    transport.write(peer, [PageMove(0, 1, 1)])
    assert transport.paths == (KvPath(KvPathKind.SHARED_MEMORY, "intra-node", "process_vm_writev"),)
