"""`isthmus usage` shows what each tenant has used of a router, and how near its limits it is."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from services.cli import screen
from services.cli.router_client import ClientConfig, ask
from services.cli.table import fold, format_bytes, format_table
from services.settings.flags import load
from services.wire.isthmus.v1 import generation_pb2

_HEADINGS = (
    *("tenant", "weight", "running", "held", "requests", "refused"),
    *("prompt", "computed", "reused", "output", "moved"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageConfig(ClientConfig):
    """Show what tenants have used of a router since its start.

    A tenant's key sees its own usage, an operator's that of all; Prometheus adds several routers up.
    """


def run(argv: list[str]) -> int:
    config = load(UsageConfig, argv, prog="isthmus usage")
    answer = asyncio.run(ask(config, "ListTenants", generation_pb2.ListTenantsRequest()))
    print(format_usage(answer, screen.width()))
    return 0


def format_usage(answer: generation_pb2.ListTenantsResponse, width: int | None = None) -> str:
    """Format the table of tenants, in tokens where nothing else is said, and their limits below it."""
    table = format_table(_HEADINGS, [_row(each) for each in answer.tenants], width, ("tenant",))
    limits = [fold(line, width, indent=2) for each in answer.tenants for line in _limits(each)]
    return "\n".join([table, *(["", *limits] if limits else ())])


def _row(usage: generation_pb2.TenantUsage) -> tuple[object, ...]:
    return (
        usage.tenant,
        f"{usage.weight:g}",
        usage.running_requests,
        usage.held_tokens,
        usage.requests,
        sum(usage.refused.values()),
        usage.prompt_tokens,
        usage.computed_tokens,
        usage.reused_tokens,
        usage.completion_tokens,
        format_bytes(usage.kv_bytes_moved),
    )


def _limits(usage: generation_pb2.TenantUsage) -> Iterator[str]:
    if usage.limits:
        each = (
            f"{name} {limit:g} ({usage.refused[name]} refused)"
            for name, limit in sorted(usage.limits.items())
        )
        yield f"{usage.tenant}: {', '.join(each)}"
