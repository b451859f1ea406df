"""`python -m services.router` runs one router. Any number of routers share a cluster."""

import asyncio
import gc
import logging
import os
import secrets
import sys

from services.host import descriptors
from services.host.ports import host_port
from services.net import poller, servers
from services.observe import log_lines
from services.process import health, signals
from services.process.events import pass_on
from services.process.health import Health, Lifecycle, ProcessPhase, joint_health
from services.process.notify import Notifier
from services.router.app import OpenRouter, open_router
from services.router.router_config import RouterConfig
from services.settings.flags import load, refusing
from services.settings.named_models import resolved

_PROG = "isthmus-router"
_MORE_OBJECTS = 10_000

log = logging.getLogger("services.router")


def main() -> None:
    config = load(RouterConfig, prog=_PROG)
    with refusing(_PROG):
        config = resolved(config, weights=False)
        name = config.name or f"router-{secrets.token_hex(3)}"
        log_lines.log_service(name, config.log_level, config.log_format)
        _do_without_torch()
        _collect_rarely()
        log_lines.event(log, "open_files", limit=descriptors.raise_limit())
        asyncio.run(_run(config, name))


def _do_without_torch() -> None:
    """Keep transformers from importing torch, which its tokenizers do not need. A None in sys.modules means
    that a module does not exist (Python's reference, the module cache)."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # It would warn that torch is missing.


def _collect_rarely() -> None:
    """Let the garbage collector look for reference cycles when there are 10,000 more objects, not 700.

    A request's objects are in no cycle, so they are freed without it. With a thousand requests at once, its
    search takes a seventh of a router's time by Python's default.
    """
    gc.set_threshold(_MORE_OBJECTS, *gc.get_threshold()[1:])


async def _run(config: RouterConfig, name: str) -> None:
    stopping, lifecycle, notifier = signals.stop_on_signals(), Lifecycle("the router"), Notifier()
    poller.start()

    def check() -> Health:
        return joint_health([lifecycle.health(), config.tls_health()])

    def waits() -> None:
        lifecycle.enter(ProcessPhase.WAITING)

    async with (
        health.answering(config.host, config.health_port, check),
        open_router(config, name, stopping, waits) as router,
    ):
        if not stopping.is_set():
            _log_ready(config, router)
            lifecycle.enter(ProcessPhase.SERVING)
            notifier.serves()
        await _serve_until_stopped(router, stopping, lifecycle, config.grace_s)
    log_lines.event(log, "router_stopped")


def _log_ready(config: RouterConfig, router: OpenRouter) -> None:
    log_lines.event(
        log,
        "router_ready",
        endpoint=host_port(config.host, router.server.port),
        http=host_port(config.host, router.http_port),
        metrics_port=router.metrics_port,
    )


async def _serve_until_stopped(
    router: OpenRouter, stopping: asyncio.Event, lifecycle: Lifecycle, grace_s: float
) -> None:
    watchdog = asyncio.create_task(pass_on(router.failed, stopping))

    async def stop_http() -> None:
        await stopping.wait()
        lifecycle.enter(ProcessPhase.STOPPING)
        router.watch.close()
        await router.http.stop()

    await asyncio.gather(servers.serve_until_stopped(router.server, stopping, grace_s), stop_http())
    watchdog.cancel()


if __name__ == "__main__":
    with signals.ending_at_once():
        main()
