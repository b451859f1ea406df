"""Write docs/metrics.md from the metrics that the services register.

`--check` writes nothing and exits with 1 when what is committed differs from what would be written.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from services.engine.base import DecodeEngine, PrefillEngine
from services.engine.paged.shell.paged_engine import steps_metric
from services.engine.paged.shell.tiers import tier_metrics
from services.etcd.connection import EtcdSettings
from services.etcd.etcd_client import Etcd
from services.index.index_metrics import (
    EtcdMetrics,
    MembershipCollector,
    MirrorCollector,
    staleness_histogram,
)
from services.index.joining import Schema
from services.index.keys import ClusterKeys
from services.index.pins import PinWriter
from services.index.read.mirror import Mirror
from services.index.write.membership import Membership
from services.net.certificates import CertificateCollector
from services.observe import build_info
from services.rank.rank_metrics import DecodeMetrics, HandOverMetrics, PrefillMetrics, RequestMetrics
from services.router.cluster import Cluster
from services.router.http.bounded_connection import HttpMetrics
from services.router.models import Models, ModelsCollector
from services.router.plan_loop import PlanMetrics
from services.router.request.router_metrics import RankCollector, RouterMetrics
from services.router.tenants import TenantCollector
from services.router.watch_cluster import WatchMetrics
from services.values.kv import KvLayout
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.rank_reports import RankLoad, Registration

TABLE = Path(__file__).parent / "metrics.md"
_HEAD = """\
# Metrics

Written by `docs/generate_metrics.py` from the code; `make lint` holds it to that.

Every router and every rank serves `/metrics` on a port of its own (`--metrics-port`), in Prometheus's text
format or, if asked, in OpenMetrics with exemplars (the `trace_id` of a recorded trace). Every sample has the
labels `isthmus_cluster`, `role` (`router`, `prefill`, `decode`), `worker` (a router's name), `rank`, and
`model`, the name that is served. If a router reports of a rank, `role`, `worker` and `rank` are that rank's.
A router serves its metrics at `/metrics` of its HTTP port, too, behind API keys if there are any, but not to
a tenant's key. No request, conversation or error text is ever a label, and a tenant is one only where
`--tenants` names it.

With engine sglang a rank's page also has SGLang's own metrics (`sglang:...`), and
`isthmus_sglang_metrics_up`, 0 if SGLang could not be asked. `gen_ai_server_...` follow OpenTelemetry's
conventions for generative AI, as do attributes of the router's spans (`gen_ai.request.model` ...).
"""
_SECTIONS = {
    ("router",): "Routers",
    ("prefill", "decode"): "Ranks",
    ("decode",): "Decode ranks",
    ("prefill",): "Prefill ranks",
    ("router", "prefill", "decode"): "All",
}


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    def __str__(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels)
        kind = f"{self.kind} ({labels})" if labels else self.kind
        return f"| `{self.name}` | {kind} | {self.meaning} |"


class _IdleEngine:
    def load(self) -> RankLoad:
        return RankLoad()


class _EngineCollector(Collector):
    """This adds the metrics of our own engines to a rank's page."""

    def collect(self) -> Iterator[Metric]:
        yield from steps_metric({})
        yield from tier_metrics(None)


class _EmptyCluster:
    def ranks(self, role: Role) -> list[Any]:
        return []

    def missed(self) -> list[Any]:
        return []


async def registries() -> dict[str, CollectorRegistry]:
    """As the services fill them, by role."""
    made = {role: CollectorRegistry() for role in ("router", "prefill", "decode")}
    keys, settings = ClusterKeys("c"), EtcdSettings(("127.0.0.1:1",))
    async with Etcd(settings, rng=random.Random(0)) as etcd:
        mirror = Mirror(etcd, keys, "r")
        made["router"].register(MirrorCollector(mirror, PinWriter(etcd, keys, mirror.known_pin)))
        staleness_histogram(made["router"])
        RouterMetrics(made["router"])
        PlanMetrics(made["router"])
        WatchMetrics(made["router"])
        HttpMetrics(made["router"])
        made["router"].register(RankCollector(cast(Cluster, _EmptyCluster()), mirror))
        made["router"].register(TenantCollector({}, dict))
        made["router"].register(ModelsCollector(Models()))
        metrics: dict[Role, RequestMetrics] = {
            Role.PREFILL: PrefillMetrics(made["prefill"], cast(PrefillEngine, _IdleEngine())),
            Role.DECODE: DecodeMetrics(made["decode"], cast(DecodeEngine, _IdleEngine())),
        }
        for role, of_requests in metrics.items():
            HandOverMetrics(made[role.value], of_requests.digests)
            address = RankAddress(RankId("w", 0, Generation(1)), "127.0.0.1:1")
            registration = Registration(role, address, KvLayout(64, 1, 0), "m", 1, 1, "fake", (), "")
            membership = Membership(etcd, keys, Schema(64, "s"), registration)
            made[role.value].register(MembershipCollector(membership))
            made[role.value].register(_EngineCollector())
    for registry in made.values():
        EtcdMetrics(registry)
        registry.register(CertificateCollector({}))
        ProcessCollector(registry=registry)
        build_info.register(registry, "")
    return made


def rows(registry: CollectorRegistry) -> Iterator[Row]:
    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            owner = collector if isinstance(collector, MetricWrapperBase) else metric
            suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
            labels = tuple(getattr(owner, "_labelnames", None) or ())
            if metric.type == "info" or (metric.type == "histogram" and not labels):
                # They are with its values alone.
                labels = tuple(name for name in metric.samples[0].labels if name != "le")
            yield Row(metric.name + suffix, metric.type, labels, metric.documentation)


def table() -> str:
    of_role = {role: set(rows(registry)) for role, registry in asyncio.run(registries()).items()}
    everything = set.union(*of_role.values())
    text = _HEAD
    for roles, title in _SECTIONS.items():
        section = {row for row in everything if tuple(r for r in of_role if row in of_role[r]) == roles}
        lines = [str(row) for row in sorted(section, key=lambda row: row.name)]
        text += f"\n## {title}\n\n| metric | type (labels) | meaning |\n|---|---|---|\n"
        text += "\n".join(lines) + "\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if not check:
        TABLE.write_text(table())
    elif not TABLE.exists() or TABLE.read_text() != table():
        sys.exit("docs/metrics.md is stale, run docs/generate_metrics.py")


if __name__ == "__main__":
    main()
