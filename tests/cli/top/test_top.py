"""`isthmus top` before a router that tells a script, at a terminal and piped."""

import asyncio
import json
import os
import pty
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from cli.top.cluster_news import finished, first
from services.cli.look import top
from services.net import servers
from services.settings.flags import load
from services.values.errors import PeerFailed
from services.wire.isthmus.v1 import generation_pb2_grpc
from services.wire.isthmus.v1.generation_pb2 import WatchClusterResponse

pytestmark = pytest.mark.long


class Router(generation_pb2_grpc.GenerationServicer):
    """Tells two responses, then nothing until the call ends."""

    def __init__(self):
        self.asked, self.left = [], asyncio.Event()

    async def WatchCluster(self, request, context):
        self.asked.append((request, dict(context.invocation_metadata())))
        try:
            await context.write(first())
            await context.write(WatchClusterResponse(finished=[finished()]))
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.fixture
async def router():
    router = Router()
    server = await servers.open_server(
        "127.0.0.1:0",
        lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(router, server),
        [],
    )
    router.flag = f"--router=127.0.0.1:{server.port}"
    yield router
    await server.stop()


async def shown(router, *flags):
    """Run it to its end; it must have left the router."""
    config = load(top.TopConfig, [router.flag, *flags], prog="isthmus top")
    assert await asyncio.wait_for(top._top(config), 20) == 0
    await asyncio.wait_for(router.left.wait(), 20)


async def test_once_is_one_picture(router, capsys):
    await shown(router, "--once")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"isthmus top  {router.flag.removeprefix('--router=')}  all tenants")
    assert sum(line.startswith(("decode/", "prefill/")) for line in lines) == 3
    assert any(line.startswith("request-1") for line in lines)
    assert max(map(len, lines)) <= 80 and "\x1b" not in "".join(lines)


async def test_json_is_the_routers_words(router, capsys):
    await shown(router, "--once", "--json")
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["running"][0]["request_id"] == "request-1" and told["ranks"][0]["rank"]["worker"] == "prefill"
    assert not router.asked[0][0].no_candidates


async def test_a_pipe_gets_a_picture_each_interval(router, capsys, monkeypatch):
    """Until it is told to end."""
    printed = top._View.print

    def print_and_end(view):
        printed(view)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(top._View, "print", print_and_end)
    await shown(router, "--interval-s=60")
    out = capsys.readouterr().out
    assert out.count("isthmus top") == 1 and "\x1b" not in out
    ((asked, _),) = router.asked
    assert asked.interval_s == 60 and asked.all_tenants and asked.no_candidates


async def test_what_is_asked_for(subtests, router, tmp_path):
    with subtests.test("the key and the tenant are shown"):
        (tmp_path / "keys").write_text("s3cret tenant=acme\n")
        await shown(router, "--once", f"--api-key-file={tmp_path / 'keys'}", "--tenant=acme")
        ((asked, metadata),) = router.asked
        assert metadata["authorization"] == "Bearer s3cret"
        assert (asked.tenant, asked.all_tenants) == ("acme", False)
    with subtests.test("where no router is it says so"):
        config = load(top.TopConfig, ["--router=127.0.0.1:1"], prog="isthmus top")
        with pytest.raises(PeerFailed, match=r"no router answers on 127\.0\.0\.1:1"):
            await top._top(config)


@pytest.fixture
def terminal(monkeypatch):
    """`use` has the command read and write there, `seen` is what has come out, `type` puts keys in."""
    ours, theirs = pty.openpty()
    stdin, stdout = (os.fdopen(os.dup(theirs), mode, buffering=1) for mode in "rw")
    seen = bytearray()

    def use():  # pytest puts streams of its own there before each test
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setenv("TERM", "xterm")

    def read():
        try:
            while data := os.read(ours, 1 << 16):
                seen.extend(data)
        except OSError:
            pass  # nobody has it open any more

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    yield SimpleNamespace(use=use, seen=seen, type=lambda text: os.write(ours, text), fd=theirs)
    stdin.close()
    stdout.close()
    os.close(theirs)
    reading.join(5)
    os.close(ours)


@pytest.mark.parametrize("how", ["q", "SIGINT"])
async def test_at_a_terminal_it_is_live_until_somebody_leaves(router, terminal, how):
    terminal.use()
    before = top.termios.tcgetattr(terminal.fd)

    async def leave():
        while b"done-1" not in terminal.seen:
            await asyncio.sleep(0.01)
        terminal.type(b"q") if how == "q" else os.kill(os.getpid(), signal.SIGINT)

    await asyncio.gather(shown(router, "--interval-s=60"), leave())
    async with asyncio.timeout(20):
        while b"\x1b[?1049l" not in terminal.seen:
            await asyncio.sleep(0.01)
    seen = bytes(terminal.seen)
    assert b"q leaves" in seen and "█".encode() in seen
    assert (
        seen.startswith(b"\x1b[?1049h") and seen.count(b"\x1b[?1049l") == 1
    )  # a screen of its own, and back
    assert top.termios.tcgetattr(terminal.fd) == before
