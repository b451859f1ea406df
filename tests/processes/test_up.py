"""`isthmus up` as a process of its own: it starts everything, and Ctrl-C ends everything."""

import asyncio
import os
import secrets
import signal
import sys

import pytest

from bench.chaos.left_behind import marked_processes
from cluster.harness import ids_request
from processes.harness import COMMON_FLAGS, LONG_S, MARK, RANK_FLAGS, until
from services import rpc
from services.engine.fake import continuation
from services.wire.isthmus.v1 import generation_pb2_grpc


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
async def test_nothing_outlives_it(tmp_path, model_dir, number):
    mark = secrets.token_hex(8)
    flags = [f"--flag={flag.removeprefix('--')}" for flag in COMMON_FLAGS]
    flags += [f"--rank-flag={flag.removeprefix('--')}" for flag in RANK_FLAGS]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", f"--model={model_dir}", f"--data-dir={tmp_path}"),
        *("--port=0", "--http-port=0", "--decode-dp-size=1", *flags),
        env={**os.environ, MARK: mark},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("wb"),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LONG_S):
            ready = (await process.stdout.readline()).decode()
        assert ready.startswith("ready: gRPC on "), ready
        endpoint = ready.removeprefix("ready: gRPC on ").split(",")[0]
        async with rpc.open_channel(endpoint) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(ids_request([1, 2, 3]))
            assert [token async for r in call for token in r.token_ids] == continuation([1, 2, 3], 8)
        # up, etcd, a router, and a supervisor and a rank for each role
        assert len(marked_processes(MARK, mark)) == 7, marked_processes(MARK, mark)
        process.send_signal(number)
        async with asyncio.timeout(LONG_S):
            assert await process.wait() == (0 if number == signal.SIGINT else -signal.SIGKILL)
        if number == signal.SIGINT:
            assert not marked_processes(MARK, mark)
        else:  # the kernel ends them, from parent to child
            await until(lambda: not marked_processes(MARK, mark), "every process is gone")
    finally:
        for pid in marked_processes(MARK, mark):
            os.kill(pid, signal.SIGKILL)
    assert b"Traceback" not in (tmp_path / "stderr").read_bytes()
