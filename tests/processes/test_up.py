"""`isthmus up` as a process of its own: it starts everything, and Ctrl-C ends everything."""

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from bench.chaos.left_behind import marked_processes
from cluster.harness import ids_request
from net.certificates import make_certificates
from processes.harness import COMMON_FLAGS, LONG_S, MARK, RANK_FLAGS, until
from services.engine.fake import continuation
from services.net import channels
from services.net.channels import TlsConfig
from services.wire.isthmus.v1 import generation_pb2_grpc

COMMAND = (sys.executable, "-m", "services.cli")
FLAGS = (
    "--decode-dp-size=1",
    *(f"--flag={flag.removeprefix('--')}" for flag in COMMON_FLAGS),
    *(f"--rank-flag={flag.removeprefix('--')}" for flag in RANK_FLAGS),
)


class Up:
    """The command, whose processes bear a mark; `ready` is what it says then."""

    def __init__(self, folder, process, mark):
        self.folder, self.process, self.mark = folder, process, mark
        self.ready = self.page = ""

    @property
    def endpoint(self):
        return self.ready.removeprefix("ready: gRPC on ").split(",")[0]

    @property
    def said(self):
        return (self.folder / "stderr").read_text()

    def processes(self):
        return marked_processes(MARK, self.mark)

    async def line(self):
        async with asyncio.timeout(LONG_S):
            return (await self.process.stdout.readline()).decode()

    async def wait(self):
        async with asyncio.timeout(LONG_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def started(folder, model_dir, *flags):
    mark = secrets.token_hex(8)
    with (folder / "stderr").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "up", f"--model={model_dir}", f"--data-dir={folder}", *FLAGS, *flags),
            env={**os.environ, MARK: mark},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    up = Up(folder, process, mark)
    try:
        up.ready = await up.line()
        assert up.ready.startswith("ready: gRPC on "), up.said
        up.page = (await up.line()).partition(", open ")[2].strip()
        yield up
    finally:
        for pid in up.processes():
            os.kill(pid, signal.SIGKILL)
    assert "Traceback" not in up.said


async def run(*arguments, env=None, stdout=asyncio.subprocess.PIPE):
    """(exit code, standard output, standard error) of a command that ends by itself."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *arguments),
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LONG_S):
        out, err = await process.communicate()
    return process.returncode, (out or b"").decode(), err.decode()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
async def test_nothing_outlives_it(tmp_path, model_dir, number):
    async with started(tmp_path, model_dir, "--port=0", "--http-port=0") as up:
        async with channels.open_channel(up.endpoint) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(ids_request([1, 2, 3]))
            assert [token async for r in call for token in r.token_ids] == continuation([1, 2, 3], 8)
        assert "<title>Isthmus</title>" in httpx.get(up.page, verify=False).text
        # up, etcd, a router, and a supervisor and a rank for each role
        assert len(up.processes()) == 7, up.processes()
        await a_second_one_is_told_what_is_in_its_way(up, model_dir)
        await a_reader_that_leaves_is_no_fault(up)
        up.process.send_signal(number)
        assert await up.wait() == (0 if number == signal.SIGINT else -signal.SIGKILL)
        if number == signal.SIGINT:
            assert not up.processes()
        else:  # the kernel ends them, from parent to child
            await until(lambda: not up.processes(), "every process is gone")


@pytest.mark.long
async def test_nothing_listens_beyond_loopback(tmp_path, model_dir):
    """UCX's listener neither, which is no server of ours."""
    flags = ("--port=0", "--http-port=0", "--rank-flag=transport=nixl")
    async with started(tmp_path, model_dir, *flags) as up:
        pids = up.processes()
        found = {listener for pid in pids for listener in listeners(pid)}
        ranks = [pid for pid in pids if "--rank-index" in Path(f"/proc/{pid}/cmdline").read_text()]
        # Each rank's gRPC and metrics, and UCX's.
        assert ranks and all(len(listeners(pid)) >= 3 for pid in ranks)
        assert all(address.is_loopback for address, _ in found), found
        up.process.send_signal(signal.SIGINT)
        assert await up.wait() == 0


def listeners(pid):
    """The addresses and ports on which a process listens (proc(5), /proc/net/tcp)."""
    targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in targets:
                host, port = local.split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                address = ipaddress.ip_address(b"".join(words))
                found.add((getattr(address, "ipv4_mapped", None) or address, int(port, 16)))
    return found


async def a_second_one_is_told_what_is_in_its_way(up, model_dir):
    other = up.folder / "other"
    port = up.endpoint.split(":")[1]
    for folder, own, sentence in (
        (up.folder, "--port=0", f"--data-dir: {up.folder} is in use by process {up.process.pid} "),
        (
            other,
            f"--port={port}",
            f"--port: cannot listen on port {port} of 127.0.0.1: Address already in use",
        ),
    ):
        flags = (f"--model={model_dir}", f"--data-dir={folder}", own, "--http-port=0", *FLAGS)
        code, out, err = await run("up", *flags)
        assert (code, out) == (78, ""), err
        assert err.startswith(f"isthmus up: {sentence}"), err
    assert not other.exists()


async def a_reader_that_leaves_is_no_fault(up):
    """As in `isthmus generate | head -c 1`: a pipe that nobody reads any more."""
    where = f"--router={up.endpoint}"
    for arguments in (("generate", "--prompt=Hello", where), ("index", where)):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            code, _, err = await run(*arguments, stdout=writer)
        finally:
            os.close(writer)
        assert (code, err) == (141, ""), arguments


@pytest.mark.long
async def test_with_tls_it_finds_its_own_routers_and_a_second_ctrl_c_kills(tmp_path, model_dir):
    """A request that would last for its whole grace is not waited for."""
    files = make_certificates(tmp_path, "IP:127.0.0.1")
    tls = (
        f"--tls-ca={files / 'ca.pem'}",
        f"--tls-cert={files / 'cert.pem'}",
        f"--tls-key={files / 'key.pem'}",
    )
    async with started(tmp_path, model_dir, "--port=0", "--http-port=0", *tls, "--flag=grace-s=3000") as up:
        assert "OpenAI API on https://127.0.0.1:" in up.ready
        client = TlsConfig(files / "ca.pem", None, None, False, "")
        async with channels.open_channel(up.endpoint, client) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(
                ids_request([1, 2, 3], max_tokens=400)
            )
            await call.read()
            with stopped(up, "services.decode"):
                up.process.send_signal(signal.SIGINT)
                assert await up.line() == "stopping; Ctrl-C again kills everything at once\n"
                up.process.send_signal(signal.SIGINT)
                assert await up.wait() == 130
        await until(lambda: not up.processes(), "every process is gone")


@contextlib.contextmanager
def stopped(up, module):
    """Its ranks stand still, so that no request ends."""
    for pid in up.processes():
        command = Path(f"/proc/{pid}/cmdline").read_text()
        if module in command and "--rank-index" in command:
            os.kill(pid, signal.SIGSTOP)
    yield


@pytest.mark.long
async def test_a_router_or_a_worker_that_is_killed_is_started_again(tmp_path, model_dir):
    async with started(tmp_path, model_dir, "--port=0", "--http-port=0") as up:
        for module in ("services.router", "services.decode"):
            os.kill(next(pid for pid in up.processes() if runs(pid, module)), signal.SIGKILL)
            what = module.removeprefix("services.")
            again = f'process_ended how="{what} was killed, probably out of memory" starts_again_in_s=0.5'
            await until(lambda again=again: again in up.said, "it is told")
            assert await until(lambda: answer(up), "it answers again") == continuation([1, 2, 3], 8)
        up.process.send_signal(signal.SIGINT)
        assert await up.wait() == 0
        assert not up.processes()


def runs(pid, module):
    """Not a rank of its."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    return module in command and "--rank-index" not in command


async def answer(up):
    """None: not yet."""
    async with channels.open_channel(up.endpoint) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(ids_request([1, 2, 3]))
        with contextlib.suppress(grpc.aio.AioRpcError):
            return [token async for r in call for token in r.token_ids]
