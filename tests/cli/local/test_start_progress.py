"""These tests show what `isthmus up` says at a terminal."""

import io
from pathlib import Path

import pytest

from services.cli.local.local_cluster import Shape
from services.cli.local.up import StartProgress, planned

pytestmark = pytest.mark.long


def line(level, service, message):
    return f"2026-11-23T02:24:01.003Z {level} {service} services.somewhere {message}"


def test_what_up_says_as_it_goes_on(subtests):
    with subtests.test("steps until all is ready and then the log"):
        stream = io.StringIO()
        progress = StartProgress(num_ranks=3, color=False, stream=stream)
        progress.step("starting", "etcd")
        for child, text in (
            ("decode", line("INFO", "decode/0", "open_files limit=1")),
            ("decode", line("INFO", "decode/0", "weights_loading done=120 of=290")),
            ("prefill", line("WARNING", "prefill/0", "disk_full left=3")),
            ("decode", line("INFO", "decode/1", "rank_ready rank=decode/1 role=decode")),
            ("decode", "Segmentation fault"),
            ("decode", line("INFO", "decode/0", "rank_ready rank=decode/0 role=decode")),
            ("router", line("INFO", "router", "router_ready endpoint=127.0.0.1:7777")),
        ):
            progress.line(child, text)
        progress.over({"gRPC": "127.0.0.1:7777"})
        progress.line("router", line("INFO", "router", "request_finished tokens=3"))
        assert stream.getvalue().splitlines() == [
            "starting   etcd",
            "loading    decode/0: 120 of 290 weights",
            "02:24:01 WARN  prefill/0 disk_full left=3",
            "ready      decode/1 (1 of 3 ranks)",
            "decode   | Segmentation fault",
            "ready      decode/0 (2 of 3 ranks)",
            "ready      router",
            "           gRPC        127.0.0.1:7777",
            "02:24:01 INFO  router    request_finished tokens=3",
        ]
    with subtests.test("what is started in words"):
        assert planned(Shape(Path("m"), Path("d"))) == "etcd, 1 router, 1 prefill rank, 2 decode ranks"
        remote = Shape(Path("m"), Path("d"), etcd=("e:1",), routers=2, prefill_workers=0)
        assert planned(remote) == "2 routers, 2 decode ranks"
