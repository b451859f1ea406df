"""These tests show what `isthmus up` says, and to whom."""

import sys
from types import SimpleNamespace

import pytest

from services.cli.local import up
from services.router.router_config import RouterConfig
from services.settings.flags import load

pytestmark = pytest.mark.long

CLUSTER = SimpleNamespace(
    router_config=RouterConfig(model="m"),
    router_endpoint=lambda: "127.0.0.1:7878",
    http_ports=(8000,),
    etcd_endpoints=("127.0.0.1:2379",),
)


def config(*flags):
    return load(up.UpConfig, ["m", *flags])


def sit_at_terminal(monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)


def test_what_up_says_and_to_whom(subtests, capsys, monkeypatch):
    with subtests.test("a program reads one line of them"):
        assert up._progress(config()) is None
        up._report_ready(config(), CLUSTER, None)
        out, err = capsys.readouterr()
        assert err == ""
        first = (
            "ready: gRPC on 127.0.0.1:7878, OpenAI API on http://127.0.0.1:8000/v1, etcd on 127.0.0.1:2379"
        )
        assert out.splitlines()[0] == first
    with subtests.test("a person is told each address"), monkeypatch.context() as patch:
        sit_at_terminal(patch)
        up._report_ready(config("--port=7878"), CLUSTER, up._progress(config("--color=never")))
        out, err = capsys.readouterr()
        assert out == ""
        assert [line.split(maxsplit=1) for line in err.splitlines()] == [
            ["gRPC", "127.0.0.1:7878"],
            ["OpenAI", "API  http://127.0.0.1:8000/v1"],
            ["page", "http://127.0.0.1:8000/ (talk to it, and watch it)"],
            ["etcd", "127.0.0.1:2379"],
            ["chat", "isthmus chat --router=127.0.0.1:7878"],
            ["stop", "Ctrl-C"],
        ]
    with subtests.test("json is json at a terminal too"), monkeypatch.context() as patch:
        sit_at_terminal(patch)
        assert up._progress(config()) is not None
        assert up._progress(config("--log-format=json")) is None
    with subtests.test("the name of a model reaches every service"):
        assert "--model-name=org/name" in config("--model-name=org/name").shape().common_flags
        assert not [flag for flag in config().shape().common_flags if flag.startswith("--model-name")]
