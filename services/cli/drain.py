"""`isthmus drain` takes ranks out of service without breaking requests, and puts them back.

    in service --drain--> draining: nothing new, running requests go on --last one ends--> empty: exit code 0
                          meanwhile, and after it, others take over what is cached there
         ^                                |                                                |
         +--------------- --undo, or a restart of the rank -------------------------------+

A rank is told to drain once; later calls only ask how many requests run there, so that a command which waits
does not revert somebody else's --undo. When the command stops waiting (--timeout-s, Ctrl-C), the ranks stay
in the state draining.
"""

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from services.cli.router_client import RanksConfig, ask_for_ranks
from services.etcd.etcd_client import Etcd
from services.index.joining import decode_registration
from services.index.keys import ClusterKeys
from services.net import channels, grpc_errors
from services.settings.flags import Bounds, load, setting
from services.values.errors import NotFound
from services.values.rank import RankAddress, Role
from services.wire import convert
from services.wire.isthmus.v1 import rank_pb2
from services.wire.isthmus.v1.rank_pb2_grpc import RankStub

_POLL_S = 1.0
_ANSWER_TIMEOUT_S = 10.0  # This is added to the requested wait: the rank informs the routers first.
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig(RanksConfig):
    """Take ranks out of service: no new request is placed there, and running ones end normally.

    Exit code 0 once nothing runs there any more; 1 if the time is over before, or if a rank cannot be reached
    or is put back into service. They stay out of service until --undo, or until they restart. Addresses come
    from a router, or with --etcd from etcd.
    """

    targets: tuple[str, ...] = setting(help="WORKER for all of its ranks, or WORKER/RANK", positional=True)
    undo: bool = setting(False, "put them back into service")
    hand_over_s: float | None = setting(
        None,
        "seconds in which others of their role may take over what they have cached, 0: none are asked, "
        "nor when they are stopped then; "
        "default: what the rank was started with",
        bounds=Bounds(at_least=0),
    )
    timeout_s: float = setting(
        300.0, "seconds to wait until nothing runs there; 0: do not wait", bounds=Bounds(at_least=0)
    )


@dataclass(frozen=True, slots=True)
class ListedRank:
    role: Role
    model: str
    address: RankAddress
    draining: bool

    def __str__(self) -> str:
        return str(self.address.id.key)


def run(argv: list[str]) -> int:
    config = load(DrainConfig, argv, prog="isthmus drain")
    return asyncio.run(_run(config))


async def _run(config: DrainConfig) -> int:
    listed = await listed_ranks(config)
    named = ranks_named(config.targets, listed)
    if not config.undo:
        for model, role in roles_without(named, listed):
            others = f"other {role.value} rank of model {model}"
            print(f"isthmus drain: no {others} takes requests", file=sys.stderr)
    act = _undrain if config.undo else _drain
    outcomes = await asyncio.gather(*(answered(act, config, rank, "isthmus drain") for rank in named))
    return 0 if all(outcomes) else 1


def ranks_named(targets: Iterable[str], listed: Sequence[ListedRank]) -> list[ListedRank]:
    """Return the ranks that `targets` name, once each, sorted by key. Raises NotFound for another name."""
    named: dict[str, ListedRank] = {}
    for target in targets:
        found = [rank for rank in listed if target in (str(rank), rank.address.id.worker)]
        if not found:
            raise NotFound(f"there is no rank or worker {target!r}; {_there_are(listed)}")
        named |= {str(rank): rank for rank in found}
    return sorted(named.values(), key=lambda rank: rank.address.id.key)


def roles_without(leaving: Sequence[ListedRank], listed: Sequence[ListedRank]) -> list[tuple[str, Role]]:
    left = {(rank.model, rank.role) for rank in listed if not rank.draining and rank not in leaving}
    without = {(rank.model, rank.role) for rank in leaving} - left
    return sorted(without, key=lambda each: (each[0], each[1].value))


def _there_are(listed: Sequence[ListedRank]) -> str:
    names = sorted(str(rank) for rank in listed)
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"there are {', '.join(names[:_MOST_SHOWN])}{more}" if names else "no rank is registered"


async def listed_ranks(config: RanksConfig) -> list[ListedRank]:
    if config.etcd:
        return await _read_etcd(config)
    return [
        ListedRank(
            convert.role_from_proto(status.role),
            status.model,
            RankAddress(convert.rank_id_from_proto(status.rank), status.endpoint),
            status.state == "draining",
        )
        for status in (await ask_for_ranks(config)).ranks
    ]


async def _read_etcd(config: RanksConfig) -> list[ListedRank]:
    keys = ClusterKeys(config.cluster)
    async with Etcd(config.etcd_settings(), rng=random.Random()) as etcd:
        _, found = await etcd.snapshot(keys.registrations)
    registrations = [decode_registration(kv.value) for kv in found]
    return [ListedRank(known.role, known.model, known.address, known.draining) for known in registrations]


_ConfigT = TypeVar("_ConfigT", bound=RanksConfig)
_T = TypeVar("_T")


async def answered(
    act: Callable[[RankStub, ListedRank, _ConfigT], Awaitable[_T]],
    config: _ConfigT,
    rank: ListedRank,
    command: str,
) -> _T | None:
    """Return what `act` returns, or say which error the rank answered with, and return None."""
    try:
        async with channels.open_channel(rank.address.endpoint, config.tls()) as channel:
            return await act(RankStub(channel), rank, config)
    except grpc.aio.AioRpcError as error:
        print(f"{command}: {rank}: {grpc_errors.error_from(error)}", file=sys.stderr)
        return None


async def _drain(stub: RankStub, rank: ListedRank, config: DrainConfig) -> bool:
    clock = asyncio.get_running_loop().time
    deadline, shown, is_requested = clock() + config.timeout_s, "", False
    while True:
        left_s = max(0.0, deadline - clock())
        answer = await _ask_to_drain(stub, rank, config, min(_POLL_S, left_s), only_wait=is_requested)
        is_requested = True
        running, hands_over = answer.running, answer.HasField("hand_over") and not answer.hand_over.over
        if running == 0 and not hands_over:
            if answer.HasField("hand_over"):
                print(f"{rank}: {_told(answer.hand_over)}", flush=True)
            print(f"{rank}: drained", flush=True)
            return True
        if left_s == 0:
            what = f"{running} still running" if running else "still handing over"
            print(f"{rank}: {what} after {config.timeout_s:g} s, and nothing new", flush=True)
            return False
        doing = f"draining, {running} running" if running else "handing over what is cached"
        if doing != shown:
            print(f"{rank}: {doing}", flush=True)
            shown = doing


def _told(hand_over: rank_pb2.HandOver) -> str:
    handed, left = hand_over.handed_tokens, hand_over.left_tokens
    if not handed and not hand_over.successors and left:
        return f"{left:,} cached tokens are left, for no rank of its kind can take them over"
    others = "rank" if hand_over.successors == 1 else "ranks"
    return f"handed over {handed:,} cached tokens to {hand_over.successors} {others}, left {left:,}"


async def _ask_to_drain(
    stub: RankStub, rank: ListedRank, config: DrainConfig, wait_s: float, only_wait: bool
) -> rank_pb2.DrainResponse:
    generation, timeout_s = rank.address.id.generation, wait_s + _ANSWER_TIMEOUT_S
    request = rank_pb2.DrainRequest(
        generation=generation, wait_s=wait_s, only_wait=only_wait, hand_over_s=config.hand_over_s
    )
    answer: rank_pb2.DrainResponse = await stub.Drain(request, timeout=timeout_s)
    return answer


async def _undrain(stub: RankStub, rank: ListedRank, _config: DrainConfig) -> bool:
    request = rank_pb2.UndrainRequest(generation=rank.address.id.generation)
    await stub.Undrain(request, timeout=_ANSWER_TIMEOUT_S)
    print(f"{rank}: in service", flush=True)
    return True
