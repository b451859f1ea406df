"""SGLang's router before workers that only answer: what it costs there, for the same clients.

The workers (worker.py) are processes that stream one token a step over SGLang's /generate. The router looks
at the text or ids for its policy, and tokenizes nothing.
"""

import asyncio
import sys
import tempfile
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from bench.report import Row
from bench.router.peers.child import child
from bench.router.process import tree_cpu_s
from bench.router.saturated import Grid, row
from services.host.ports import free_ports
from services.values.errors import ConfigError

_READY_S = 60.0


async def saturated_peer(grid: Grid, python: Path, workers: int = 2) -> list[Row]:
    """Rows as saturated.py's, of front generate. `python` has sglang_router."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-peer-")))
        port, metrics_port, *worker_ports = free_ports("127.0.0.1", 2 + workers)
        command = [sys.executable, "-m", "bench.router.peers.worker", str(grid.step_s)]
        children = {
            f"worker-{index}": await stack.enter_async_context(
                child([*command, str(worker_port)], folder / f"worker-{index}.log")
            )
            for index, worker_port in enumerate(worker_ports)
        }
        urls = [f"http://127.0.0.1:{worker_port}" for worker_port in worker_ports]
        command = [str(python), "-m", "sglang_router.launch_router", "--host=127.0.0.1", f"--port={port}"]
        command += [
            f"--prometheus-port={metrics_port}",
            "--log-level=warn",
            "--worker-startup-check-interval=1",
        ]
        log = folder / "router.log"
        children["router"] = await stack.enter_async_context(child([*command, "--worker-urls", *urls], log))
        await _until_ready(f"http://127.0.0.1:{port}/health", children["router"], log)

        def spent() -> dict[str, float]:
            took = {name: tree_cpu_s(child.pid) for name, child in children.items()}
            return {"router": took.pop("router"), "decode": sum(took.values())}

        address = {"generate": f"127.0.0.1:{port}"}
        return [await row(asked, spent) for asked in replace(grid, fronts=("generate",)).asked(address)]


async def _until_ready(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_READY_S):
        while not await asyncio.to_thread(_answers, url):
            if child.returncode is not None:
                raise ConfigError(f"sglang-router ended: {log.read_text(errors='replace')[-2000:]}")
            await asyncio.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
