"""`isthmus role` has ranks go on in their other role, with what they have loaded and cached.

    decode --SetRole: nothing new, what runs ends--> leaves the cluster --> prefill, as another life
                |
                '--the time is over: refused, and it takes requests again

Ranks change one after the other, so that the last one of a role is refused as such.
"""

import asyncio
import sys
from dataclasses import dataclass
from typing import Literal

import grpc

from services.cli.drain import ListedRank, listed_ranks, ranks_named
from services.cli.router_client import RanksConfig
from services.net import channels, grpc_errors
from services.settings.flags import Bounds, load, setting
from services.values.errors import Unavailable
from services.wire.isthmus.v1 import rank_pb2
from services.wire.isthmus.v1.rank_pb2_grpc import RankStub

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 10.0  # This is added to the requested wait: the rank informs the routers first.
_BACK_S = 60.0  # A rank that has not registered by then has failed, or etcd is away.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig(RanksConfig):
    """Change the role of ranks of engine torch: `isthmus role decode/0 prefill`.

    A rank takes no new requests until nothing runs there, and goes on in the other role, with its process,
    its model and what it has cached. Exit code 0 once all are registered in it; 1 where one refuses, is busy
    for too long, or does not come back. Their processes start in their first roles again. Addresses come from
    a router, or with --etcd from etcd.
    """

    targets: tuple[str, ...] = setting(help="WORKER/RANK, or WORKER for all of its ranks", positional=True)
    role: Literal["prefill", "decode"] = setting(help="that they are to have", positional=True)
    force: bool = setting(False, "even the last rank of its role, without which requests may be refused")
    timeout_s: float = setting(
        300.0,
        "seconds to wait until nothing runs on a rank; 0: only where nothing runs",
        bounds=Bounds(at_least=0),
    )


def run(argv: list[str]) -> int:
    return asyncio.run(_run(load(RoleConfig, argv, prog="isthmus role")))


async def _run(config: RoleConfig) -> int:
    failed = False
    for rank in ranks_named(config.targets, await listed_ranks(config)):
        try:
            await _change(config, rank)
            await _registered(config, rank)
            print(f"{rank}: {config.role}", flush=True)
        except (grpc.aio.AioRpcError, Unavailable) as error:
            why = error if isinstance(error, Unavailable) else grpc_errors.error_from(error)
            print(f"isthmus role: {rank}: {why}", file=sys.stderr)
            failed = True
    return int(failed)


async def _change(config: RoleConfig, rank: ListedRank) -> None:
    request = rank_pb2.SetRoleRequest(
        generation=rank.address.id.generation,
        role=config.role,
        wait_s=config.timeout_s,
        force=config.force,
    )
    async with channels.open_channel(rank.address.endpoint, config.tls()) as channel:
        await RankStub(channel).SetRole(request, timeout=config.timeout_s + _ANSWER_TIMEOUT_S)


async def _registered(config: RoleConfig, before: ListedRank) -> None:
    """Return once the rank is known in its new role. Raises Unavailable when that takes too long, or its
    process has begun again."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + _BACK_S
    while clock() < deadline:
        known = [rank for rank in await listed_ranks(config) if rank.address.id.key == before.address.id.key]
        if later := [rank for rank in known if rank.address.id != before.address.id]:
            if later[0].role.value == config.role:
                return
            raise Unavailable(f"its process has ended, and another one serves as {later[0].role.value}")
        await asyncio.sleep(_POLL_S)
    raise Unavailable(f"it has left as {before.role.value}, and has not registered within {_BACK_S:g} s")
