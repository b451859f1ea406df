"""Pools of pages, and ranks in other processes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import services
from services.values.kv import PoolMemory

PASSIVE_RANK = Path(__file__).parent / "passive_rank.py"


class Pool:
    """Pages filled with bytes that differ from page to page and from pool to pool."""

    def __init__(self, num_pages: int, page_bytes: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.pages = rng.integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
        self.page_bytes = page_bytes
        self.memory = PoolMemory(self.pages.ctypes.data, num_pages)

    def snapshot(self) -> np.ndarray:
        return self.pages.copy()


class PassiveRank:
    """A rank in another process that only registers pools, units and bytes each; ask it what is in there."""

    def __init__(self, transport: str, *shapes: tuple[int, int], seed: int) -> None:
        root = str(Path(services.__file__).parents[1])
        command = [sys.executable, str(PASSIVE_RANK), transport, str(seed)]
        command += [f"{num_units}x{unit_bytes}" for num_units, unit_bytes in shapes]
        env = {**os.environ, "PYTHONPATH": root}
        self._shapes = shapes
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    @cached_property
    def _facts(self) -> dict:
        """Read late, so that a caller can start its own transport meanwhile."""
        return json.loads(self.process.stdout.readline())

    @property
    def metadata(self) -> bytes:
        return bytes.fromhex(self._facts["metadata"])

    @property
    def memories(self) -> list[PoolMemory]:
        places = zip(self._facts["base_addresses"], self._shapes, strict=True)
        return [PoolMemory(address, num_units) for address, (num_units, _) in places]

    def snapshot(self) -> list[np.ndarray]:
        """By pool."""
        self.process.stdin.write(b"snapshot\n")
        self.process.stdin.flush()
        return [self._read(shape) for shape in self._shapes]

    def _read(self, shape: tuple[int, int]) -> np.ndarray:
        content = self.process.stdout.read(shape[0] * shape[1])
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)

    @contextmanager
    def stopped(self):
        """Nothing that needs its threads ends meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def make_pool():
    return Pool


@pytest.fixture(scope="session")
def spawn_passive_rank():
    return PassiveRank
