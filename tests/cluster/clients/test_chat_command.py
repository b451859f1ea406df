"""`isthmus chat` with a cluster: through a pipe, and at a terminal of 80 columns."""

import asyncio
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from contextlib import asynccontextmanager, suppress

from cluster.harness import FakeCluster
from services.cli import chat

LONG_S = 60.0  # a deadline for conditions, never waited out
SLOW = {"fake_step_s": 0.02}


async def test_the_second_turn_of_a_pipe_hits(etcd_endpoint, model_dir, cluster_name, capsys, monkeypatch):
    said = "Tell me about the canal.\n\nWho dug it?\n/stats\n/quit\nnobody asks this\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        flags = [f"--router=127.0.0.1:{cluster.routers[0].server.port}", "--max-tokens=6", "--temperature=0"]
        assert await asyncio.to_thread(chat.run, flags) == 0
        page = cluster.base.page_size
        await cluster.assert_nothing_held()
    printed, _, table = capsys.readouterr().out.partition("#  decode rank")
    assert len(printed) > 6 and "found on" not in printed
    rows = [line.split() for line in table.splitlines()[2:4]]
    assert [row[0] for row in rows] == ["1", "2"] and rows[0][1] == rows[1][1]
    (first, second), (none, found) = ([int(row[i]) for row in rows] for i in (3, 4))
    # The whole first turn is there, its answer too, but for the last page.
    assert none == 0 and first + 6 - 2 * page < found < second


class AtTerminal:
    """A command whose terminal we are; `seen` is what it has written."""

    def __init__(self, master):
        self.master = master
        self.seen = ""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self):
        try:
            self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
        except OSError:  # the other end has closed
            asyncio.get_running_loop().remove_reader(self.master)
        self._news.set()

    def type(self, text):
        self.seen = ""
        os.write(self.master, text.encode())

    async def interrupted(self, pattern):
        """Ctrl-C at the prompt. CPython heeds one that comes just before readline waits with the next."""
        for _ in range(3):
            self.type("\x03")
            with suppress(TimeoutError):
                return await self.until(pattern, LONG_S / 6)
        raise AssertionError(f"Ctrl-C brought {self.seen!r}")

    async def until(self, pattern, timeout_s=LONG_S):
        async with asyncio.timeout(timeout_s):
            while not re.search(pattern, self.seen):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def at_terminal(folder, *arguments):
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *arguments),
        env={**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(folder)},
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        yield AtTerminal(master), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


async def test_at_a_terminal_ctrl_c_stops_the_answer(etcd_endpoint, model_dir, cluster_name, tmp_path):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **SLOW) as cluster:
        where = f"--router=127.0.0.1:{cluster.routers[0].server.port}"
        async with at_terminal(tmp_path, "chat", where, "--max-tokens=300") as (terminal, process):
            await terminal.until("fake: 1 prefill and 2 decode ranks(.|\n)*> ")
            terminal.type("Hello there\r")
            await terminal.until("Hello there\r\n.")
            terminal.type("\x03")
            await terminal.until("found on .*\r?\n?.*stopped(.|\n)*> ")
            await cluster.assert_nothing_held()
            terminal.type("/sta\t\r")
            await terminal.until("tokenize(.|\n)*TTFT(.|\n)*> ")
            assert max(map(len, terminal.seen.split("\r\n"))) <= 80
            terminal.type("/nonsense\r")
            await terminal.until("there is no command /nonsense(.|\n)*> ")
            await terminal.interrupted("Ctrl-C again, or Ctrl-D, leaves(.|\n)*> ")
            terminal.type("\x04")
            assert await asyncio.wait_for(process.wait(), LONG_S) == 0
    assert "Hello there" in (tmp_path / "isthmus" / "chat_history").read_text()
    assert (tmp_path / "isthmus" / "chat_history").stat().st_mode & 0o077 == 0
