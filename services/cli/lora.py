"""`isthmus lora` loads LoRA adapters on ranks that run, unloads them, and lists them.

A rank reads the directory itself, below its --lora-dir. Routers learn of it from the rank's registration, so
clients may ask for the adapter as soon as the first ranks have it.
"""

import asyncio
from dataclasses import dataclass

from services.cli.drain import ListedRank, answered, listed_ranks, ranks_named
from services.cli.router_client import RanksConfig
from services.cli.table import format_table
from services.settings.flags import Bounds, load, setting
from services.values.errors import ConfigError
from services.wire.isthmus.v1 import rank_pb2
from services.wire.isthmus.v1.rank_pb2_grpc import RankStub

_WORDS = {"load": 3, "unload": 2, "ls": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(RanksConfig):
    """Load an adapter on ranks: `load NAME DIRECTORY`; give it up: `unload NAME`; list all: `ls`.

    DIRECTORY is below the ranks' --lora-dir. Unloading waits for the requests that need it. Exit code 1
    if a rank refuses, or cannot be reached. Addresses come from a router, or with --etcd from etcd.
    """

    words: tuple[str, ...] = setting(help="load, unload or ls, and what to", positional=True)
    ranks: tuple[str, ...] = setting((), "WORKER for all of its ranks, or WORKER/RANK; default: all")
    timeout_s: float = setting(300.0, "seconds to wait for each rank", bounds=Bounds(above=0))

    def __post_init__(self) -> None:
        RanksConfig.__post_init__(self)
        if len(self.words) != _WORDS.get(self.words[0]):
            raise ConfigError("isthmus lora takes `load NAME DIRECTORY`, `unload NAME`, or `ls`")


def run(argv: list[str]) -> int:
    return asyncio.run(_run(load(LoraConfig, argv, prog="isthmus lora")))


async def _run(config: LoraConfig) -> int:
    listed = await listed_ranks(config)
    named = ranks_named(config.ranks, listed) if config.ranks else listed
    act = {"load": _load, "unload": _unload, "ls": _list}[config.words[0]]
    answers = await asyncio.gather(*(answered(act, config, rank, "isthmus lora") for rank in named))
    rows = [
        (str(rank), rank.role.value, *row)
        for rank, answer in zip(named, answers, strict=True)
        for row in answer or ()
    ]
    print(format_table(["rank", "role", "adapter", "digest", ""], rows) if rows else "no adapter is loaded")
    return 1 if None in answers else 0


async def _load(stub: RankStub, rank: ListedRank, config: LoraConfig) -> list[tuple[str, ...]]:
    _, name, directory = config.words
    request = rank_pb2.LoadAdapterRequest(
        generation=rank.address.id.generation, name=name, directory=directory
    )
    adapter = (await stub.LoadAdapter(request, timeout=config.timeout_s)).adapter
    return [(adapter.name, adapter.digest, "loaded")]


async def _unload(stub: RankStub, rank: ListedRank, config: LoraConfig) -> list[tuple[str, ...]]:
    name = config.words[1]
    request = rank_pb2.UnloadAdapterRequest(generation=rank.address.id.generation, name=name)
    await stub.UnloadAdapter(request, timeout=config.timeout_s)
    return [(name, "", "unloaded")]


async def _list(stub: RankStub, rank: ListedRank, config: LoraConfig) -> list[tuple[str, ...]]:
    request = rank_pb2.ListAdaptersRequest(generation=rank.address.id.generation)
    adapters = (await stub.ListAdapters(request, timeout=config.timeout_s)).adapters
    return [(adapter.name, adapter.digest, "") for adapter in adapters]
