"""`isthmus up` with a model that thinks and calls tools, and keys: what the page is tried on."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = [os.environ.get("SERVICES_PYTHON", sys.executable), "-m", "services.cli"]
KEYS = "bare-key\nacme-key tenant=acme\nours-key operator\n"
_MARK = "ISTHMUS_PAGE_MARK"
_FLAGS = (
    "--port=0",
    "--http-port=0",
    "--router-flag=plans=remote",
    "--flag=index-block=16",
    "--rank-flag=page-size=16",
    "--rank-flag=kv-pages=512",
    "--rank-flag=lease-ttl-s=3",
    "--rank-flag=num-threads=1",
    "--rank-flag=self-check=off",
)


@dataclass(frozen=True)
class Up:
    url: str
    mark: str

    def rank_process(self, role, index):
        """The process id of a rank: the child of its role's supervisor."""
        found = {pid: command for pid, command in self._processes() if f"services.{role}" in command}
        ranks = [pid for pid, command in found.items() if f"--rank-index={index}" in command]
        assert len(ranks) == 1, found
        return ranks[0]

    def kill_rank(self, role, index):
        os.kill(self.rank_process(role, index), signal.SIGKILL)

    def _processes(self):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    yield int(folder.name), (folder / "cmdline").read_text().split("\0")


@contextlib.contextmanager
def running(folder, model=None, *flags):
    """`model`: a checkpoint's directory; one of no meaning is made where it is None."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), _MARK: secrets.token_hex(8)}
    if model is None:
        model = folder / "model"
        make = ["make-model", str(model), "--tokenizer=bytes", "--chat-template=thinking"]
        subprocess.run([*SERVICES, *make], env=environment, check=True, capture_output=True)
    (keys := folder / "keys").write_text(KEYS)
    command = [*SERVICES, "up", f"--model={model}", f"--data-dir={folder / 'etcd'}", *_FLAGS, *flags]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*command, f"--router-flag=api-key-file={keys}"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        ready, where = process.stdout.readline(), process.stdout.readline()
        assert ready.startswith("ready: "), (folder / "stderr").read_text()
        yield Up(where.partition(", open ")[2].strip(), environment[_MARK])
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
    assert "Traceback" not in (folder / "stderr").read_text()
