"""`python -m services.router`: one router. Any number of them share a cluster."""

import asyncio
import logging
import secrets

from services import rpc, telemetry
from services.config import load, refusing
from services.router.app import open_router
from services.router.config import RouterConfig

_PROG = "isthmus-router"

log = logging.getLogger("services.router")


def main() -> None:
    config = load(RouterConfig, prog=_PROG)
    with refusing(_PROG):
        name = config.name or f"router-{secrets.token_hex(3)}"
        telemetry.setup_logging(name, config.log_level)
        asyncio.run(_run(config, name))


async def _run(config: RouterConfig, name: str) -> None:
    """Until SIGTERM, or until it cannot go on."""
    stopping = rpc.stop_on_signals()
    async with open_router(config, name) as router:
        telemetry.event(
            log,
            "router_ready",
            endpoint=f"{config.host}:{router.server.port}",
            http=f"{config.host}:{router.http_port}",
            metrics_port=router.metrics_port,
        )
        watchdog = asyncio.create_task(_forward(router.failed, stopping))
        await rpc.serve_until_stopped(router.server, stopping, config.grace_s)
        watchdog.cancel()
    telemetry.event(log, "router_stopped")


async def _forward(source: asyncio.Event, target: asyncio.Event) -> None:
    await source.wait()
    target.set()


if __name__ == "__main__":
    main()
