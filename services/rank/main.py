"""This is the process around an engine, in either role. Every rank process does this:

    /metrics served -> engine started -> gRPC server bound -> registered in etcd, events published -> SERVING
    SIGTERM -> NOT_SERVING, registered as draining -> running requests finish or the grace ends
            -> others have taken over what is cached here (leaving.py) -> deregistered -> engine stopped

A rank that changes its role (role_change.py) does both without a pause, in one process: nobody takes over,
and the next engine begins with the core of the last one, its model, pool and tree. A SIGTERM that comes
meanwhile ends the next life, since that alone can hand over what is cached.

`python -m services.decode --dp-size=N` starts a supervisor, and each rank runs the same module with
`--rank-index`. An engine that has all DP ranks in one process (sglang) has one such process, with a server, a
registration and a port for each rank. A rank draws a new random generation at each start, and in each role.
"""

import asyncio
import faulthandler
import gc
import logging
import math
import os
import random
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector

from services.engine import choose
from services.engine.base import Engine
from services.engine.pool_memory import free_beside_tiers, pool_pages, ranks_memory, read_config
from services.etcd.etcd_client import Etcd
from services.host import descriptors, memory
from services.host.ports import bindable, host_port, is_loopback
from services.index.index_metrics import EtcdMetrics, MembershipCollector
from services.index.joining import Schema
from services.index.keys import ClusterKeys
from services.index.write.membership import Membership
from services.index.write.publisher import PublisherSettings
from services.kv.block_hash import SCHEME
from services.net import poller, servers
from services.net.certificates import CertificateCollector
from services.observe import build_info, log_lines, prometheus, traces
from services.process import signals, supervisor
from services.process.events import pass_on
from services.process.notify import Notifier
from services.rank.intake import OPERATIONS, Operations, RankAdapters
from services.rank.leaving import Leaving
from services.rank.rank_config import RankConfig
from services.rank.rank_metrics import EngineCollector, HandOverMetrics
from services.rank.rank_role import MakeRoles, OpenRank, RankRole, ServedMetrics, Services
from services.rank.role_change import RoleChange
from services.settings.flags import load, refusing, to_flags
from services.settings.named_models import resolved
from services.transfer.nixl_settings import keep_to_loopback
from services.values.errors import ConfigError, root_cause
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.rank_reports import Registration
from services.wire.isthmus.v1 import rank_pb2_grpc

log = logging.getLogger(__name__)

# After the grace of its requests a rank has so long to stop its engine before its supervisor kills it.
_AFTER_GRACE_S = 15.0
# A rank ends so long after a hanging thread is noticed. It must be less than decode's fence margin.
_HUNG_END_S = 4.0


def main(module: str, makers: Mapping[Role, MakeRoles]) -> None:
    """The first of `makers` is of the role that the rank starts with."""
    prog = module.replace("services.", "isthmus-")
    config = load(RankConfig, prog=prog)
    keep_to_loopback(config.host)
    notifier = Notifier()
    with refusing(prog, notifier.ends), ExitStack() as held:
        config = resolved(config, weights=config.engine != "fake")
        descriptors.raise_limit()
        if config.rank_index is None:
            sys.exit(supervise(config, module, held))
        log_lines.log_service(f"{config.worker}/{config.rank_index}", config.log_level, config.log_format)
        config.certificates()  # Certificates that cannot work are refused before torch is imported.
        config = config if config.kv_pages else with_pool(config)
        if (follower := choose.follower(config, module)) is not None:
            sys.exit(asyncio.run(follower.serve(notifier, config.leaving_s)))
        own_ids = list(map(own_rank_id, configs := rank_configs(config, held)))
        try:
            roles = next(iter(makers.values()))(config, own_ids)
            asyncio.run(run_ranks(configs, own_ids, roles, notifier, _end_soon, makers))
        except RankFailed as error:  # Its stack explains nothing.
            notifier.ends(str(error))
            sys.exit(f"{prog}: {error}")


def supervise(config: RankConfig, module: str, held: ExitStack) -> int:
    """Run each rank of a worker as its own process, and return the exit code. `held` reserves their ports."""
    log_lines.log_service(config.worker, config.log_level, config.log_format)
    config.certificates()  # Otherwise each of its ranks would refuse them.
    _warn_of_strangers(config)
    config = with_pool(config)
    num_processes = config.dp_size // config.ranks_per_process
    flags_by_rank: dict[str, Sequence[int]] = {
        "port": _ports(config, config.port, num_processes, held),
        "metrics-port": _ports(config, config.metrics_port, num_processes, held),
    }
    if config.ranks_per_process > 1:  # Each process chooses the ports of its ranks.
        flags_by_rank = {"port": [config.port], "metrics-port": [config.metrics_port]}
    if inherited := _tier_memory(config, num_processes, held):
        flags_by_rank["kv-tier-fd"] = inherited
    # Probes call the supervisor, which calls the ranks.
    commands = supervisor.rank_commands(module, to_flags(replace(config, health_port=None)), flags_by_rank)
    timeout_s = math.inf if config.restart_timeout_s is None else config.restart_timeout_s
    return supervisor.run(
        commands,
        config.leaving_s + _AFTER_GRACE_S,
        config.host,
        config.health_port,
        timeout_s,
        config.tls_health,
        [(fd,) for fd in inherited],
    )


def _tier_memory(config: RankConfig, num_ranks: int, held: ExitStack) -> list[int]:
    """Return an open memory file for each rank with a memory tier, so that the tier outlives its process."""
    fds = (
        [os.memfd_create(f"isthmus-tier-{n}") for n in range(num_ranks)] if config.tiers.memory_bytes else []
    )
    for fd in fds:
        held.callback(os.close, fd)
    return fds


def _warn_of_strangers(config: RankConfig) -> None:
    """Warn that a rank accepts commands from everybody who can reach it.

    It requires no API key, so only mutual TLS with a peer name can tell the cluster's services from others.
    """
    tls = config.tls()
    if is_loopback(config.host) or (tls is not None and tls.peer_name):
        return
    who = "whoever reaches these ranks" if tls is None or not tls.mutual else "any certificate of --tls-ca's"
    advice = (
        f"{who} can generate without an API key, drain them, learn what they hold of any tenant and have "
        "them hold more for it: let the cluster's machines alone reach them, or set --tls-mutual with "
        "--tls-peer-name"
    )
    log_lines.event(log, "ranks_open", level=logging.WARNING, host=config.host, advice=advice)


def with_pool(config: RankConfig) -> RankConfig:
    """Return the settings with a number of pages that fits the memory of the worker's ranks.

    It is the configured number, or as many as fit. Where the memory is not known to us, the settings are
    unchanged. Raises ConfigError and Unavailable as `pool_pages` and `free_beside_tiers` do.
    """
    free_bytes, total_bytes = memory.available_bytes(), memory.total_bytes()
    if free_bytes is None or total_bytes is None:
        return config
    free_bytes = free_beside_tiers([config], free_bytes, total_bytes)
    if (ranks := ranks_memory(config, read_config(config.model))) is None:
        return config
    pages = config.kv_pages or pool_pages([ranks], free_bytes, total_bytes)
    if config.kv_pages:
        pool_pages([ranks], free_bytes, total_bytes)  # This raises an error if they do not fit.
    log_lines.event(log, "kv_pool", pages=pages, bytes_of_each=pages * ranks.page_bytes, free=free_bytes)
    return replace(config, kv_pages=pages)


def own_rank_id(config: RankConfig) -> RankId:
    return RankId(config.worker, config.rank_index or 0, Generation(secrets.randbits(64)))


def rank_configs(config: RankConfig, held: ExitStack) -> list[RankConfig]:
    if config.ranks_per_process == 1:
        return [config]
    ports = _ports(config, config.port, config.dp_size, held)
    metrics_ports = _ports(config, config.metrics_port, config.dp_size, held)
    return [
        replace(config, rank_index=index, port=port, metrics_port=metrics_port)
        for index, (port, metrics_port) in enumerate(zip(ports, metrics_ports, strict=True))
    ]


def _ports(config: RankConfig, base: int, count: int, held: ExitStack) -> tuple[int, ...]:
    return held.enter_context(supervisor.chosen_ports(config.host, base, count))


async def run_ranks(
    configs: Sequence[RankConfig],
    own_ids: Sequence[RankId],
    roles: Sequence[RankRole],
    notifier: Notifier | None = None,
    end_soon: Callable[[], None] = lambda: None,
    makers: Mapping[Role, MakeRoles] = MappingProxyType({}),
) -> None:
    """Serve until SIGTERM, or until a rank fails, in roles of `makers`. Raises as open_rank does."""
    process = _Process(notifier or Notifier(), signals.stop_on_signals(), end_soon, makers)
    poller.start()
    async with AsyncExitStack() as stack:
        beating = asyncio.create_task(process.notifier.beat_until(process.stopping), name="beats")
        stack.callback(beating.cancel)
        stack.push_async_callback(asyncio.to_thread, _setup_tracing(configs[0], own_ids, roles[0].role))
        while (next_life := await _live(process, configs, own_ids, roles)) is not None:
            own_ids, roles = [next_life[0]], [next_life[1]]
            process.notifier.waits()
        await beating


@dataclass(frozen=True, slots=True)
class _Process:
    notifier: Notifier
    stopping: asyncio.Event
    end_soon: Callable[[], None]
    makers: Mapping[Role, MakeRoles]

    def turn(self, config: RankConfig, role: RankRole) -> tuple[RankId, RankRole]:
        """Return the rank in its other role. Raises ConfigError."""
        config.check_role_changes()
        (other,) = set(Role) - {role.role}
        if other not in self.makers:
            return _keeps_role()
        (turned,) = self.makers[other](config, [own_id := own_rank_id(config)])
        return own_id, replace(turned, ledgers=role.ledgers, goes_on=True)


async def _live(
    process: _Process,
    configs: Sequence[RankConfig],
    own_ids: Sequence[RankId],
    roles: Sequence[RankRole],
) -> tuple[RankId, RankRole] | None:
    """Serve in one role; return as what the rank goes on, if it does. Raises as `run_ranks`."""
    stopping, over = process.stopping, asyncio.Event()
    async with AsyncExitStack() as stack:
        # All pages are served before the first engine starts, as with SGLang it starts those of all ranks.
        pages = [
            await stack.enter_async_context(serving_metrics(config, role.role, own_id))
            for config, own_id, role in zip(configs, own_ids, roles, strict=True)
        ]
        ranks = []

        def follow(source: asyncio.Event, target: asyncio.Event) -> None:
            stack.callback(asyncio.create_task(pass_on(source, target)).cancel)

        def waits() -> None:
            _keep_for_good()  # No requests come yet.
            process.notifier.waits()

        follow(stopping, over)
        for config, own_id, role, page in zip(configs, own_ids, roles, pages, strict=True):
            turn = partial(process.turn, config, role)
            opening = open_rank(config, own_id, role, page, stopping, waits, process.end_soon, turn)
            try:
                rank = await stack.enter_async_context(opening)
            except StoppedEarly:
                break
            ranks.append(rank)
            follow(rank.failed, stopping)
            follow(rank.role_change.decided, over)
            if not (stopping.is_set() or rank.failed.is_set()):
                _tell_ready(rank, role)
        if not stopping.is_set():
            process.notifier.serves()
        grace_s, within_s = configs[0].grace_s, configs[0].leaving_s
        await asyncio.gather(
            *(
                servers.serve_until_stopped(rank.server, over, within_s, partial(rank.drain, grace_s))
                for rank in ranks
            ),
        )
        failed = [str(rank.address.id) for rank in ranks if rank.failed.is_set()]
        next_life = ranks[0].role_change.next_life if ranks and not failed else None
        if next_life is not None:
            next_life[1].engine.succeed(ranks[0].engine)
    for own_id in own_ids:
        log_lines.event(log, "rank_stopped", rank=own_id, failed=str(own_id) in failed)
    if failed:
        raise RankFailed(f"rank {', '.join(failed)} cannot go on; the log says why")
    return next_life


def _keep_for_good() -> None:
    """Exclude all present objects from garbage collection: modules and a model never become garbage.

    To scan them would delay every running request by a tenth of a second and more, from time to time.
    """
    gc.collect()
    if gc.get_freeze_count() == 0:  # Otherwise what is left of an earlier role would stay, with its sockets.
        gc.freeze()


def _setup_tracing(config: RankConfig, own_ids: Sequence[RankId], role: Role) -> Callable[[], None]:
    who = str(own_ids[0]) if len(own_ids) == 1 else config.worker
    process = traces.TracedProcess(role.value, who, config.cluster)
    return traces.setup_tracing(process, config.otlp_endpoint, config.trace_sample_ratio)


def _tell_ready(rank: OpenRank, role: RankRole) -> None:
    log_lines.event(
        log,
        "rank_ready",
        rank=rank.address.id,
        role=role.role.value,
        endpoint=rank.address.endpoint,
        metrics_port=rank.metrics_port,
    )


@asynccontextmanager
async def serving_metrics(config: RankConfig, role: Role, own_id: RankId) -> AsyncIterator[ServedMetrics]:
    """Serve /metrics before the engine starts, since the process must be observable while a model loads.

    Raises ConfigError when the address cannot be bound.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build_info.register(registry, config.engine)
    registry.register(CertificateCollector(config.certificates()))
    labels = _process_labels(config, role, own_id)
    port, stop = prometheus.serve_metrics(config.host, config.metrics_port, registry, labels)
    try:
        yield ServedMetrics(registry, port)
    finally:
        await asyncio.to_thread(stop)


def _keeps_role() -> tuple[RankId, RankRole]:
    raise ConfigError("this process serves in one role alone")


@asynccontextmanager
async def open_rank(
    config: RankConfig,
    own_id: RankId,
    role: RankRole,
    page: ServedMetrics,
    stopping: asyncio.Event | None = None,
    waits: Callable[[], None] = lambda: None,
    end_soon: Callable[[], None] = lambda: None,
    turn: Callable[[], tuple[RankId, RankRole]] = _keeps_role,
) -> AsyncIterator[OpenRank]:
    """Run a rank from its engine's start to its engine's stop.

    It is open once it is registered, or has failed, or `stopping` is set. `waits` is called when only etcd is
    missing, and `end_soon` when a thread of the engine hangs; `turn` makes what it is in its other role.

    Raises ConfigError, Unavailable where another start may work, and StoppedEarly.
    """
    stopping = stopping or asyncio.Event()
    failed, engine = asyncio.Event(), role.engine
    async with AsyncExitStack() as stack:
        await (engine.start() if role.goes_on else _start(engine, stopping))
        stack.push_async_callback(engine.stop)
        watchdog = asyncio.create_task(_note_crash(engine, failed, end_soon))
        stack.callback(watchdog.cancel)
        page.registry.register(EngineCollector(engine.metrics))
        services = role.make_services(page.registry)
        stack.push_async_callback(services.close)
        hands_over = engine.hands_over
        metrics = HandOverMetrics(page.registry, services.digests)
        leaving = Leaving(
            *(hands_over, services.intake, config.hand_over_s, config.tls(), metrics),
            moves=config.move_running,
        )
        adapting = RankAdapters(engine.adapters, config.lora_dir)
        role_change = RoleChange(role.role, services.intake, leaving, adapting, turn)
        operations = Operations(services.intake, hands_over, leaving, adapting, role_change.change)
        server = await servers.open_server(
            host_port(bindable(config.host), config.port),
            partial(_register, services, operations),
            [*services.names, OPERATIONS],
            config.tls(),
            serving=False,
        )
        stack.push_async_callback(server.stop)
        address = RankAddress(own_id, host_port(config.reached_at, server.port))
        waits()
        membership = await _join(stack, config, role, address, page.registry, failed, stopping)
        services.intake.tell, adapting.tell = membership.say_draining, membership.say_adapters
        leaving.knows(address, membership.successors, engine.max_context_tokens)
        role_change.others = membership.others_of_role
        stack.push_async_callback(leaving.close)
        await server.set_serving(not (stopping.is_set() or failed.is_set()))
        yield OpenRank(address, engine, server, services.intake, leaving, role_change, page.port, failed)


def _register(services: Services, operations: Operations, server: grpc.aio.Server) -> None:
    services.register(server)
    rank_pb2_grpc.add_RankServicer_to_server(operations, server)


class StoppedEarly(Exception):
    """SIGTERM came while the engine was starting, so the start is undone: a model may load for minutes."""


async def _start(engine: Engine, stopping: asyncio.Event) -> None:
    starting, stop = asyncio.create_task(engine.start()), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise StoppedEarly
        starting.result()
    finally:
        stop.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


def _process_labels(config: RankConfig, role: Role, own_id: RankId) -> dict[str, str]:
    return {
        prometheus.CLUSTER_LABEL: config.cluster,
        "role": role.value,
        "worker": own_id.worker,
        "rank": str(own_id.rank),
        "model": config.served_name,
    }


class RankFailed(Exception):
    """The process ends with this error, so that the supervisor starts a new incarnation."""


async def _note_crash(engine: Engine, failed: asyncio.Event, end_soon: Callable[[], None]) -> None:
    if await engine.crashed():
        end_soon()
    failed.set()


def _end_soon() -> None:
    """End the process within `_HUNG_END_S`: no thread may write after others have given the process up."""
    faulthandler.dump_traceback_later(_HUNG_END_S, exit=True)


async def _join(
    stack: AsyncExitStack,
    config: RankConfig,
    role: RankRole,
    address: RankAddress,
    registry: CollectorRegistry,
    failed: asyncio.Event,
    stopping: asyncio.Event,
) -> Membership:
    """Register and publish in the background until the stack is closed. It returns once the rank is
    registered or has failed, or `stopping` is set."""
    etcd = await stack.enter_async_context(
        Etcd(config.etcd_settings(), rng=random.Random(), observe=EtcdMetrics(registry).observe)
    )
    membership = Membership(
        etcd,
        ClusterKeys(config.cluster),
        Schema(config.index_block, SCHEME),
        _registration(config, role, address),
        ttl_s=config.lease_ttl_s,
        publisher_settings=PublisherSettings(config.index_flush_ms / 1000, config.index_writes_per_s),
        ledger=role.ledgers[0],
        below_ledger=role.ledgers[1],
        with_tiers=role.engine.has_tiers,
        shared_files=lambda: role.engine.shared_files,
    )
    registry.register(MembershipCollector(membership))
    events = role.engine.cache_events(), role.engine.below_events()
    task = asyncio.create_task(membership.run(*events), name="membership")
    # The schema differs, or a later incarnation has our place. Waiting would help with neither.
    task.add_done_callback(lambda ended: None if ended.cancelled() else failed.set())
    waits = {asyncio.create_task(event.wait()) for event in (membership.registered, stopping, failed)}
    await asyncio.wait({task, *waits}, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if task.done() and (error := task.exception()) is not None:
        raise root_cause(error)

    async def leave() -> None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise root_cause(error)

    stack.push_async_callback(leave)
    return membership


def _registration(config: RankConfig, role: RankRole, address: RankAddress) -> Registration:
    return Registration(
        role=role.role,
        address=address,
        layout=role.engine.layout,
        model=config.served_name,
        max_context_tokens=role.engine.max_context_tokens,
        model_context_tokens=role.engine.model_context_tokens,
        total_pages=config.pool_pages,
        engine=config.engine,
        capabilities=role.capabilities,
        model_path=config.model,
        adapters=role.engine.adapters.loaded if role.engine.adapters is not None else (),
    )
