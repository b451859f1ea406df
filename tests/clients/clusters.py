"""A cluster of `isthmus up` for clients that are programs of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("CLIENTS", ROOT / ".cache" / "clients"))  # what make test-clients made


@contextlib.contextmanager
def running(model: Path, folder: Path, *flags: str) -> Iterator[str]:
    """Where it answers over HTTP; `folder` is its own. Nothing in its log may be a traceback."""
    ports = [f"--{name}={free_port()}" for name in ("port", "http-port")]
    command = [sys.executable, "-m", "services.cli", "up", f"--model={model}", f"--data-dir={folder}", *ports]
    common = [
        "--router-flag=reasoning-parser=none",
        "--decode-dp-size=1",
        "--rank-flag=num-threads=1",
        "--rank-flag=self-check=off",
    ]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*command, *common, *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready: "), (folder / "stderr").read_text()
        yield f"http://127.0.0.1:{ports[1].partition('=')[2]}"
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
    assert "Traceback" not in (folder / "stderr").read_text()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
