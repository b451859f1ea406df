"""`isthmus usage` shows what each tenant has used of a router, and how near its limits it is."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from services.cli import screen
from services.cli.router_client import ClientConfig, key_metadata, naming
from services.cli.table import fold, format_bytes, format_table
from services.settings.flags import load
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

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
    print(format_usage(asyncio.run(_ask(config)), screen.width()))
    return 0


async def _ask(config: UsageConfig) -> generation_pb2.ListTenantsResponse:
    metadata = key_metadata(config.api_key_file)
    async with config.open_channel() as channel:
        list_tenants = generation_pb2_grpc.GenerationStub(channel).ListTenants
        with naming(config.router):
            answer = await list_tenants(generation_pb2.ListTenantsRequest(), timeout=10, metadata=metadata)
    assert isinstance(answer, generation_pb2.ListTenantsResponse)
    return answer


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
