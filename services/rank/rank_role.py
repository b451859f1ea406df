"""A rank of either role consists of an engine, the services in front of it, and its place in the cluster."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from services.engine.base import Engine
from services.index.write.rank_ledger import RankLedger
from services.net import servers
from services.rank.intake import Intake
from services.rank.leaving import Leaving
from services.rank.rank_config import RankConfig
from services.rank.rank_metrics import DigestMetrics
from services.rank.role_change import RoleChange
from services.values.rank import RankAddress, RankId, Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    register: Callable[[grpc.aio.Server], None]
    names: Sequence[str]
    intake: Intake
    digests: DigestMetrics
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RankRole:
    role: Role
    engine: Engine
    make_services: Callable[[CollectorRegistry], Services]
    capabilities: tuple[str, ...] = ()  # Its registration reports them to the routers.
    # They know what lies in its pool, and below that, over all lives of the process.
    ledgers: tuple[RankLedger, RankLedger] = field(default_factory=lambda: (RankLedger(), RankLedger()))
    goes_on: bool = False  # Its engine goes on with what another role's has, which takes moments.


@dataclass(frozen=True, slots=True)
class ServedMetrics:
    """This is the /metrics page of a rank; before the engine has started it shows only the process."""

    registry: CollectorRegistry
    port: int


@dataclass(frozen=True, slots=True)
class OpenRank:
    """`failed` is set when the rank can never work again."""

    address: RankAddress
    engine: Engine
    server: servers.RpcServer
    intake: Intake
    leaving: Leaving
    role_change: RoleChange
    metrics_port: int
    failed: asyncio.Event

    async def drain(self, grace_s: float | None = None) -> None:
        """Report to the routers that it stops, and return when nothing runs, or after `grace_s`.

        It also waits until others have taken over what they can, unless it only changes its role. Requests
        that still come to a failed rank, from routers that have not been notified yet, are refused at once,
        since it cannot serve them.
        """
        if not (self.failed.is_set() or self.role_change.decided.is_set()):
            self.leaving.begin()
        try:
            async with asyncio.timeout(grace_s):
                await self.intake.stop(at_once=self.failed.is_set())
        except TimeoutError:
            log.warning("drain_timed_out grace_s=%g", grace_s)
        if self.failed.is_set():
            self.leaving.undo()  # Its engine does not answer any more.
        await self.leaving.ended(nothing_more_ends=True)


MakeRoles = Callable[[RankConfig, Sequence[RankId]], Sequence[RankRole]]
