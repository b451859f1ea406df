"""SGLang as a child process: its end takes its whole tree with it, and ours takes it.

start --> running --SIGTERM, a while, SIGKILL to what is left--> stopped
              +--exits unasked--> ended
"""

import asyncio
import logging
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from services.child_lines import child_lines
from services.parent_death import dying_with_us

log = logging.getLogger(__name__)

# SGLang looks every 5 s whether it was told to stop; then its schedulers give back what they hold.
_TERM_TIMEOUT_S = 12.0
_LAST_LINES = 200
_SHARED_MEMORY = Path("/dev/shm")
_NOISE = ("WARNING", "UserWarning", "FutureWarning")


class SglangProcess:
    """`python -m sglang.launch_server`, in our process group, so that a supervisor reaps it with us."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *dying_with_us(self._command),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        log.info("sglang_started pid=%d", self._process.pid)
        self._reader = asyncio.create_task(self._pass_lines(self._process), name="sglang-log")

    async def stop(self, in_order: bool = True) -> None:
        """Returns when every process of SGLang's has ended; not in order: killed at once."""
        if self._process is None:
            return
        tree = self._tree(self._process.pid)
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + (_TERM_TIMEOUT_S if in_order else 0.0)
        while any(map(_alive, tree)) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for process in filter(_alive, tree):
            process.kill()
        await self._process.wait()
        _unlink_segments({process.pid for process in tree})
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that killed it."""
        return None if self._process is None else self._process.returncode

    def last_error(self) -> str:
        """The line that most probably says why it ended."""
        telling = [line for line in self._lines if "Error" in line or "error:" in line]
        telling = [line for line in telling if not any(noise in line for noise in _NOISE)]
        return (telling or list(self._lines) or ["it wrote nothing"])[-1].strip()

    def _tree(self, pid: int) -> list[psutil.Process]:
        try:
            root = psutil.Process(pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def _pass_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in child_lines(process.stdout):
                if line:
                    self._lines.append(line)
                    print(line, file=sys.stderr, flush=True)
        finally:
            await process.wait()
            self.ended.set()
        log.warning("sglang_ended code=%s", process.returncode)


def _unlink_segments(pids: set[int]) -> None:
    """Of shared memory whose makers were killed: named sgl_shm_<kind>_<pid>_<random>, and in no one's way
    until the tmpfs is full."""
    for segment in _SHARED_MEMORY.glob("sgl_shm_*_*_*"):
        if segment.name.split("_")[-2] in map(str, pids):
            segment.unlink(missing_ok=True)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
