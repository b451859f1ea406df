"""A rolling upgrade, and the way back: processes of the last release beside those of today, under load."""

import asyncio
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from last_release import take
from processes.harness import ProcessCluster, prompt_of, until
from services.cli.local.local_cluster import Child, LocalCluster
from services.engine.fake import continuation

SAYS_SO = "this is the last release"
CLIENTS = 6
OLD = ("router-0", "prefill-0", "decode-0")
NEW_FLAGS = ("--share-weights=on",)  # `isthmus up` starts processes of its own version alone
NEW = ("router-1", "prefill-1", "decode-1")


@pytest.fixture
def last_release(tmp_path: Path) -> Path:
    """Its sources; each of its processes says what it is."""
    services = take("services", tmp_path / "last-release")
    with (services / "__init__.py").open("a") as file:
        file.write(f"\nprint({SAYS_SO!r}, flush=True)\n")
    return services.parent


class MixedCluster(LocalCluster):
    """Some of its children, by name, have their modules from elsewhere."""

    elsewhere: Mapping[str, Path]

    async def start_child(self, name: str, module: str, flags: list[str]) -> Child:
        tree = self.elsewhere.get(name)
        with variables(importing(tree) if tree else {}):
            return await super().start_child(
                name, module, [f for f in flags if not tree or f not in NEW_FLAGS]
            )


def importing(tree: Path) -> dict[str, str]:
    """The variables of a Python that finds its modules there, and not where it stands."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


@contextmanager
def variables(added: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Load:
    """Conversations, until told to stop; whatever is not as it should be ends the test."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self.routers = [0, 1]
        self.met: set[tuple[int, str, str]] = set()  # router, prefill worker, decode worker
        self.turns = 0

    async def converse(self, number: int, stop: asyncio.Event) -> None:
        for conversation in itertools.count(number, CLIENTS):
            ids = prompt_of(conversation, 60)
            for turn in range(3):
                if stop.is_set():
                    return
                router = self.routers[(conversation + turn) % len(self.routers)]
                finish = await self._cluster.generate(ids, 8, router, conversation_id=str(conversation))
                placed = finish.placement
                self.met.add((router, placed.prefill.worker, placed.decode.worker))
                self.turns += 1
                ids = [*ids, *continuation(ids, 8), conversation % 500, turn]

    async def meets(self, *wanted: tuple[int, str, str]) -> None:
        self.met.clear()
        await until(lambda: self.met >= {*wanted}, f"requests go these ways: {wanted}")


def of_both(routers: list[int]) -> list[tuple[int, str, str]]:
    return list(itertools.product(routers, ("prefill-0", "prefill-1"), ("decode-0", "decode-1")))


async def swapped(cluster: ProcessCluster, load: Load, name: str) -> None:
    """Stop it, and start the other version in its place."""
    local = cluster.local
    child = local.children[name]
    if name.startswith("router"):
        load.routers = [1 - int(name[-1])]  # as its Service would
        await asyncio.sleep(0.5)
    assert await child.stop() == 0, name
    tree = local.elsewhere.get(name)
    others = {key: value for key, value in local.elsewhere.items() if key != name}
    local.elsewhere = others if tree else {**others, name: cluster.last_release}
    await local.start_child(name, child.command[2], child.command[3:])
    await cluster.until_whole()
    load.routers = [0, 1]


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_no_request_fails_while_two_versions_serve_together(tmp_path, model_dir, last_release):
    shape = dict(routers=2, prefill_workers=2, decode_workers=2, decode_dp_size=1)
    cluster = ProcessCluster(tmp_path / "cluster", model_dir, local=MixedCluster, **shape)
    cluster.last_release = last_release
    cluster.local.elsewhere = dict.fromkeys(OLD, last_release)
    stop = asyncio.Event()
    async with cluster, asyncio.TaskGroup() as clients:
        load = Load(cluster)
        for number in range(CLIENTS):
            clients.create_task(load.converse(number, stop))
        await load.meets(*of_both([0, 1]))
        # New leaves old behind, and old leaves new.
        for name in ("decode-1", "decode-0", "prefill-0", "prefill-1", "router-0", "router-1"):
            await swapped(cluster, load, name)
            print(f"--- {name} is of the other version, {load.turns} turns so far")
        await load.meets(*of_both([0, 1]))
        stop.set()
    said = {line.partition("|")[0] for line in cluster.other_lines if SAYS_SO in line}
    assert said == {*OLD, *NEW}
