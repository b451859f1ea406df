"""This module assembles a router: mirror, pins, streams to the ranks, and the gRPC and HTTP front ends."""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.types import ASGIApp

from services.etcd.etcd_client import Etcd
from services.host import descriptors
from services.host.ports import bindable, host_port, listen
from services.index.index_metrics import EtcdMetrics, MirrorCollector, staleness_histogram
from services.index.joining import Schema, keep_schema
from services.index.keys import ClusterKeys
from services.index.pins import PinWriter
from services.index.read.mirror import Mirror, keep_from_garbage_collector
from services.kv.block_hash import SCHEME
from services.net import servers
from services.net.bytes_in_flight import BytesInFlight
from services.net.certificates import CertificateCollector
from services.observe import build_info, log_lines, prometheus, traces
from services.process.events import first_of
from services.router import callers
from services.router.api_keys import ApiKeys, GrpcDoor, KeyRefusals, TokenCallers
from services.router.cluster import Cluster
from services.router.connections.rank_health import SuspectChecks
from services.router.generation_service import (
    GENERATE,
    SERVICE_NAME,
    GenerationService,
    add_to_server,
    generate_handler,
)
from services.router.http.bounded_connection import BoundedConnection, HttpBounds, HttpMetrics, HttpTls
from services.router.http.page import Page
from services.router.http.routes import http_app
from services.router.models import Models, ModelsCollector
from services.router.models_file import ModelsFile
from services.router.observed_load import ObservedLoad
from services.router.plan_loop import Planning
from services.router.replay.planner import Goals
from services.router.request.generation import Generator
from services.router.request.progress import held_tokens
from services.router.request.router_metrics import RouterMetrics
from services.router.router_config import RouterConfig
from services.router.served_model import Model, Surroundings, open_model, read_checkpoint
from services.router.tenants import TenantCollector, Tenants
from services.router.watch_cluster import Watch, WatchMetrics
from services.settings.named_models import resolved
from services.values.errors import ConfigError, root_cause

_RANKS_LATE_S = 10.0
_INDEX_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRouter:
    """`failed` is set when the router can never work again."""

    name: str
    server: servers.RpcServer
    http: "HttpFront"
    metrics_port: int
    models: Models
    watch: Watch
    mirror: Mirror
    failed: asyncio.Event

    @property
    def http_port(self) -> int:
        return self.http.port

    @property
    def generator(self) -> Generator:
        return self.models.default.generator

    @property
    def cluster(self) -> Cluster:
        return self.models.default.cluster


@contextlib.asynccontextmanager
async def open_router(
    config: RouterConfig,
    name: str,
    stopping: asyncio.Event | None = None,
    waits: Callable[[], None] = lambda: None,
) -> AsyncIterator[OpenRouter]:
    """Open a router for as long as the context lasts. It is open once it knows the ranks, or `stopping` is
    set. `waits` is called when only etcd is missing.

    Raises ConfigError where the configuration cannot be served.
    """
    stopping, failed = stopping or asyncio.Event(), asyncio.Event()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build_info.register(registry, engine="none")
    metrics = RouterMetrics(registry, config.served_name)
    checkpoint = read_checkpoint(config)
    api_keys = None
    if config.api_key_file is not None or config.jwks_file is not None:
        refusals, tokens = KeyRefusals(metrics.unauthenticated), _tokens(config)
        api_keys = ApiKeys(config.api_key_file, refusals, tokens)
    tls = config.tls()
    async with AsyncExitStack() as stack:
        process = traces.TracedProcess("router", name, config.cluster)
        stack.callback(traces.setup_tracing(process, config.otlp_endpoint, config.trace_sample_ratio))
        keys = ClusterKeys(config.cluster)
        etcd = await stack.enter_async_context(
            Etcd(config.etcd_settings(), rng=random.Random(), observe=EtcdMetrics(registry).observe)
        )
        observe = staleness_histogram(registry).observe
        mirror = Mirror(etcd, keys, name, fleet=config.served_name, observe_staleness=observe)
        pins = PinWriter(etcd, keys, mirror.known_pin)
        registry.register(prometheus.OnLoop(MirrorCollector(mirror, pins)))
        schema = keep_schema(etcd, keys, Schema(config.index_block, SCHEME), lambda: mirror.listings)
        for work in (mirror.run(), pins.run(), schema, keep_from_garbage_collector(mirror)):
            await stack.enter_async_context(_background(work, failed))
        tenants = None
        if config.tenants is not None:
            tenants = Tenants(config.tenants, lambda: mirror.place_among_routers()[1])
        models = Models()
        if tenants is not None:
            collector = TenantCollector(tenants.accounts, lambda: held_tokens(models.running))
            registry.register(prometheus.OnLoop(collector))
        around = Surroundings(mirror, pins, tls, tenants, models.served_names, models.ended)
        models.open(await stack.enter_async_context(open_model(config, checkpoint, around, metrics)))
        checks = SuspectChecks(mirror, tls, models.dead)
        await stack.enter_async_context(_background(checks.run(), failed))
        bound = MessageBound(config.max_message_bytes)
        bound.note(config.served_name, checkpoint.most_message_bytes)
        further = _further_models(config, models, around, registry, failed, bound)
        await stack.enter_async_context(further)
        watch = Watch(models, models.list_ranks, WatchMetrics(registry), config.max_watchers)
        load = _observed_load(config, models, mirror)
        if load is not None and config.plans_ranks:
            await stack.enter_async_context(_background(_planning(config, models, load).run(), failed))
        service = GenerationService(models, watch, tenants, load)
        largest = bound.bytes
        in_flight = BytesInFlight(
            config.max_bytes_in_flight, largest, metrics.message_refused, callers.tenant_by_key
        )
        bound.follow(in_flight)
        metrics.message_bytes.set_function(lambda: in_flight.held)
        log_lines.event(
            log, "message_bounds", largest_bytes=largest, in_flight_bytes=config.max_bytes_in_flight
        )
        server = await _serve_grpc(config, service, api_keys, largest, in_flight)
        stack.push_async_callback(server.stop)
        labels = {
            prometheus.CLUSTER_LABEL: config.cluster,
            "role": "router",
            "worker": name,
            "model": config.served_name,
        }
        their_metrics = partial(_further_metrics, models, labels)
        shown = prometheus.MetricsPage(registry, labels, their_metrics)
        http_metrics = HttpMetrics(registry)
        front = http_app(
            models,
            watch,
            page=_page(config),
            keys=api_keys,
            allowed_origins=config.allowed_origins,
            leaves_images_out=config.images == "placeholder",
            max_body_bytes=lambda: bound.bytes,
            in_flight=in_flight,
            count=http_metrics.count_call,
            metrics=shown,
        )
        http = await stack.enter_async_context(_serve_http(config, front, http_metrics))
        stack.callback(watch.close)  # It closes before HTTP, which waits for its calls.
        registry.register(CertificateCollector(config.certificates()))
        metrics_port, stop_metrics = prometheus.serve_metrics(
            config.host, config.metrics_port, registry, labels, their_metrics
        )
        stack.push_async_callback(asyncio.to_thread, stop_metrics)
        waits()
        await _wait_for_index(mirror, failed, stopping)
        await server.set_serving(not stopping.is_set())
        yield OpenRouter(name, server, http, metrics_port, models, watch, mirror, failed)


@contextlib.asynccontextmanager
async def _further_models(
    config: RouterConfig,
    models: Models,
    around: Surroundings,
    registry: CollectorRegistry,
    failed: asyncio.Event,
    bound: "MessageBound",
) -> AsyncIterator[None]:
    """Serve the models of --models, too. `bound` hears of the messages that those listed now can need."""
    if config.models is None:
        yield
        return
    registry.register(prometheus.OnLoop(ModelsCollector(models)))

    @contextlib.asynccontextmanager
    async def opened(config: RouterConfig) -> AsyncIterator[Model]:
        config = await asyncio.to_thread(resolved, config, weights=False)
        checkpoint = await asyncio.to_thread(read_checkpoint, config)
        bound.note(config.served_name, checkpoint.most_message_bytes)
        metrics = RouterMetrics(CollectorRegistry(), config.served_name)
        around.mirror.join_fleet(config.served_name)
        try:
            async with open_model(config, checkpoint, around, metrics) as model:
                yield model
        finally:
            around.mirror.leave_fleet(config.served_name)

    file = ModelsFile(config.models, config, models, opened, around.mirror.ranks.values)
    async with file.serving(), _background(file.run(), failed):
        yield


class MessageBound:
    """Clients' messages may be as large as the models can need that have been served, or as
    --max-message-bytes states. It follows models that come later over HTTP alone: gRPC takes its bound when
    its server opens.
    """

    def __init__(self, stated: int) -> None:
        self.bytes = stated
        self._is_stated = bool(stated)
        self._in_flight: BytesInFlight | None = None

    def follow(self, in_flight: BytesInFlight) -> None:
        """Count by this from now on; gRPC's server takes what is the bound now."""
        self._in_flight = in_flight

    def note(self, model: str, needed_bytes: int) -> None:
        if self._is_stated or needed_bytes <= self.bytes:
            return
        if self._in_flight is None:
            self.bytes = needed_bytes
            return
        grpc_bytes, self.bytes = self.bytes, self._in_flight.admit_larger(needed_bytes)
        log_lines.event(
            log,
            "message_bound_raised",
            level=logging.WARNING,
            model=model,
            needed_bytes=needed_bytes,
            http_bytes=self.bytes,
            grpc_bytes=grpc_bytes,
        )


def _observed_load(config: RouterConfig, models: Models, mirror: Mirror) -> ObservedLoad | None:
    if not config.plan_window_s:
        return None
    load = ObservedLoad(models, config.plan_window_s, lambda model: mirror.place_among_routers(model)[1])
    models.listen(load.note)
    return load


def _planning(config: RouterConfig, models: Models, load: ObservedLoad) -> Planning:
    goals = Goals(config.plan_ttft_s or math.inf, config.plan_itl_ms / 1e3 or math.inf, config.plan_goodput)
    times = config.plan_every_s, config.plan_down_s, config.plan_window_s
    return Planning(models, load, goals, *times, config.plan_headroom)


def _tokens(config: RouterConfig) -> TokenCallers | None:
    if config.jwks_file is None:
        return None
    from services.router.json_web_tokens import TokenRules, Tokens  # What it needs takes time to import.

    rules = TokenRules(config.jwt_audience, config.jwt_issuer, config.jwt_tenant_claim)
    return Tokens(config.jwks_file, rules)


def _further_metrics(models: Models, labels: Mapping[str, str]) -> list[prometheus.Part]:
    """Return the metrics of the models beside --model: each has all of a router's for itself."""
    return [(model.registry, {**labels, "model": model.name}) for model in models.others.values()]


async def _serve_grpc(
    config: RouterConfig,
    service: GenerationService,
    api_keys: ApiKeys | None,
    largest: int,
    in_flight: BytesInFlight,
) -> servers.RpcServer:
    num_connections = config.grpc_max_connections or descriptors.limit() // 4
    return await servers.open_server(
        host_port(bindable(config.host), config.port),
        partial(add_to_server, service),
        [SERVICE_NAME],
        config.tls(),
        serving=False,
        interceptors=[] if api_keys is None else [GrpcDoor(api_keys)],
        busy={GENERATE: generate_handler(service)},
        bounds=servers.ClientBounds(largest, in_flight, num_connections, config.grpc_idle_s),
    )


def _page(config: RouterConfig) -> Page | None:
    return Page() if config.page == "on" else None


async def _wait_for_index(mirror: Mirror, *ends: asyncio.Event) -> None:
    """Wait until etcd has listed the ranks, however long that takes: a router without ranks must not replace
    one that has some. Then wait a moment for the index; until it is read, only load decides."""
    await first_of(mirror.ranks_known, *ends, timeout_s=_RANKS_LATE_S)
    if not mirror.ranks_known.is_set():
        log_lines.event(log, "router_waits_for_etcd", level=logging.WARNING, reason=mirror.degraded)
        await first_of(mirror.ranks_known, *ends)
        if not mirror.ranks_known.is_set():
            return
    await first_of(mirror.ready, *ends, timeout_s=_INDEX_TIMEOUT_S)
    if not mirror.ready.is_set():
        log_lines.event(log, "router_degraded", level=logging.WARNING, reason=mirror.degraded)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[Any, Any, None], failed: asyncio.Event) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(lambda t: failed.set() if not t.cancelled() and t.exception() else None)
    try:
        yield
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception as error:
            raise root_cause(error) from error


@dataclass(frozen=True, slots=True)
class HttpFront:
    port: int
    _server: uvicorn.Server
    _task: asyncio.Task[None]

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.shield(self._task)


@contextlib.asynccontextmanager
async def _serve_http(config: RouterConfig, app: ASGIApp, metrics: HttpMetrics) -> AsyncIterator[HttpFront]:
    try:
        listener = listen(config.host, config.http_port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host_port(config.host, config.http_port)}: {error}") from error
    num_connections = config.http_max_connections or descriptors.limit() // 2
    bounds = HttpBounds(
        config.http_header_timeout_s,
        config.http_body_timeout_s,
        num_connections,
        surplus=min(64, num_connections // 4),
    )
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        # A proxy that pools connections must be the one that closes them: a request on a connection that we
        # are closing gets a reset.
        timeout_keep_alive=config.http_keep_alive_s,
        http=partial(BoundedConnection, bounds, metrics.count_end),  # type: ignore[arg-type]
        timeout_graceful_shutdown=int(config.grace_s),
    )
    if (tls := config.tls()) is not None:
        settings.load()
        settings.ssl = HttpTls(tls)
    server = _HttpServer(settings)
    metrics.connections.set_function(lambda: len(server.server_state.connections))
    front = HttpFront(listener.getsockname()[1], server, asyncio.create_task(server.serve([listener])))
    try:
        yield front
    finally:
        await front.stop()


class _HttpServer(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
