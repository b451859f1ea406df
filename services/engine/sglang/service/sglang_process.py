"""SGLang runs as a child process: its end takes its whole tree with it, and ours takes it.

A stop sends SIGTERM, waits a while, and kills what is left. If SGLang exits by itself, a stop kills what is
left of its tree. In the end the shared memory of the tree is removed. A tree whose root has gone cannot be
walked, so it is recorded before: while SGLang starts, since later it creates no more processes that matter.
"""

import asyncio
import logging
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec

import aiohttp
import psutil

from services.engine.sglang.service import leftovers
from services.engine.sglang.service.sglang_settings import IDLE_CONNECTION_S
from services.host.child_processes import child_lines, dying_with_us
from services.values.errors import ConfigError

log = logging.getLogger(__name__)

# SGLang checks every 5 s whether it was told to stop; then its schedulers free what they hold.
_TERM_TIMEOUT_S = 12.0
_KILL_TIMEOUT_S = 5.0
_LAST_LINES = 200
_NOISE = ("WARNING", "UserWarning", "FutureWarning")
_CLIENT_ERRORS = (aiohttp.ClientError, ConnectionError, TimeoutError)
_SHORT_S = 5.0


class SglangProcess:
    """`python -m sglang.launch_server` runs in our process group, so that a supervisor reaps it with us."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._tree: dict[
            psutil.Process, float
        ] = {}  # It maps all processes that have been seen to their times of birth.
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
        """Stop SGLang, and wait until all its processes have ended.

        They are killed at once unless `in_order`.
        """
        if self._process is None:
            return
        if self._process.returncode is None:
            self.note_tree()
            self._process.send_signal(signal.SIGTERM)
        await self._until_ended(_TERM_TIMEOUT_S if in_order else 0.0)
        left = [process for process in self._tree if _alive(process)]
        if left and in_order:
            log.warning("sglang_killed pids=%s after_s=%.0f", [p.pid for p in left], _TERM_TIMEOUT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await _until_exited(self._process)
        await self._until_ended(_KILL_TIMEOUT_S)
        leftovers.remove_of({p.pid: born_s for p, born_s in self._tree.items() if not _alive(p)})
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, minus the signal that killed it, or None while it runs."""
        return None if self._process is None else self._process.returncode

    def last_error(self) -> str:
        errors = [line for line in self._lines if "Error" in line or "error:" in line]
        errors = [line for line in errors if not any(noise in line for noise in _NOISE)]
        return (errors or list(self._lines) or ["it wrote nothing"])[-1].strip()

    def note_tree(self) -> None:
        """Record SGLang's processes while it runs. It costs 13 us for each process of the machine."""
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                self._tree.setdefault(process, process.create_time())

    async def _until_ended(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(map(_alive, self._tree)) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)

    async def _pass_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in child_lines(process.stdout):
                if line:
                    self._lines.append(line)
                    # SGLang stops at a line if nobody reads its output, whatever becomes of ours.
                    with suppress(OSError, ValueError):
                        print(line, file=sys.stderr, flush=True)
        finally:
            await _until_exited(process)
            self.ended.set()
        log.warning("sglang_ended code=%s", process.returncode)


async def _until_exited(process: asyncio.subprocess.Process) -> None:
    """Wait for the process alone.

    `process.wait()` also waits for the end of its output, which a child that it leaves behind may hold open.
    """
    while process.returncode is None:
        await asyncio.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class SglangHttp:
    """SGLang's own HTTP API, on loopback, reports whether it is up, and ends requests.

    One loop creates and uses it.
    """

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=IDLE_CONNECTION_S)
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.base}/health", timeout=_timeout()) as response:
                return bool(response.status == 200)
        except _CLIENT_ERRORS:
            return False

    async def abort_all(self) -> None:
        """Abort all requests; it is no error when SGLang is gone."""
        try:
            url, everything = f"{self.base}/abort_request", {"abort_all": True}
            await self._session.post(url, json=everything, timeout=_timeout())
        except _CLIENT_ERRORS:
            return


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_SHORT_S)


def require_entry_point() -> None:
    """Raise ConfigError unless SGLang would find our plugin.

    SGLang's processes use our interpreter, but would notice a missing plugin only after loading.
    """
    found = entry_points(group="sglang.srt.plugins", name="isthmus")
    if not found:
        raise ConfigError(
            "the plugin is not installed: SGLang finds it by the entry point isthmus of sglang.srt.plugins, "
            "so isthmus must be installed where SGLang is, not only be on the path"
        )
    for plugin in found:
        if not _exists(plugin.module):
            raise ConfigError(
                f"the plugin is installed as {plugin.value}, which does not exist: isthmus has changed, "
                "and must be installed again where SGLang is"
            )


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # Not even its package exists.
        return False
