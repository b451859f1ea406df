"""These tests show what a router tells of ranks whose model carries a state: in answers and metrics."""

from array import array
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from router.cluster.fake_mirror import D0_KEY, LAYOUT, connect, view
from router.http.backend import models_of
from services.router.generation_service import GenerationService
from services.router.request.generation import Explanation
from services.router.request.router_metrics import RankCollector, RouterMetrics
from services.values.kv import GroupKind, KvGroup
from services.values.rank import Plan, Role
from services.values.request import Admitted
from services.wire.isthmus.v1 import generation_pb2

STATE_BYTES = 1 << 20
HYBRID = replace(
    LAYOUT,
    groups=(
        KvGroup(GroupKind.FULL_ATTENTION, (1,), 1, 16, "float32"),
        KvGroup(GroupKind.RECURRENT, (0,), 0, 0, "float32", unit_bytes=STATE_BYTES),
    ),
)
PROMPT_TOKENS = 100  # six blocks and four tokens


@pytest.fixture
async def hybrid(cluster, mirror):
    """The decode rank holds all six blocks and goes on after two, prefill five and after four."""
    ranks = view(Role.DECODE, 0, layout=HYBRID), view(Role.PREFILL, 0, layout=HYBRID)
    mirror.set(*ranks)
    cluster.ranks(Role.DECODE)
    connect(cluster)
    cluster.prompt = await cluster.hash(array("I", range(PROMPT_TOKENS)), "")
    for rank, num_held, num_resumed in zip(ranks, (6, 5), (2, 4), strict=True):
        hashes = cluster.prompt.hashes
        mirror.index.apply_snapshot(rank.registration.id, hashes[:num_held], [hashes[num_resumed - 1]])
    return cluster


def admitted(plan: Plan, decode_prefix_len: int, prefill_prefix_len: int = 0) -> Admitted:
    computed = PROMPT_TOKENS - (prefill_prefix_len if plan is Plan.REMOTE else decode_prefix_len)
    prefixes = decode_prefix_len, prefill_prefix_len
    return Admitted(PROMPT_TOKENS, *prefixes, computed, 0, 0, 0.0, 0.0, 0.01, 0.0, plan)


class Front:
    """A generator that explains; nothing else is asked of it."""

    def __init__(self, cluster) -> None:
        self._cluster = cluster

    async def explain(self, request):
        return Explanation(PROMPT_TOKENS, self._cluster.explain(self._cluster.prompt, "", 60.0), "", {})


async def explanation(cluster) -> generation_pb2.ExplainResponse:
    service = GenerationService(models_of(Front(cluster), cluster=cluster), None)
    return await service.Explain(generation_pb2.ExplainRequest(), None)


async def test_explanations_and_the_list_of_ranks_have_both_kinds_and_what_is_carried(hybrid, balance, clock):
    answer = await explanation(hybrid)
    assert answer.carried_bytes == STATE_BYTES
    (remote,) = [candidate for candidate in answer.candidates if candidate.HasField("prefill")]
    assert (remote.decode_hit_tokens, remote.decode_resume_tokens) == (96, 32)
    assert (remote.prefill_hit_tokens, remote.prefill_resume_tokens) == (80, 64)
    assert (remote.decode_indexed_resume_tokens, remote.prefill_indexed_resume_tokens) == (32, 64)
    assert "carried" in {term.name for term in remote.terms}

    balance.resume_trust.observe(D0_KEY, 10_000, 0, clock[0])
    ranks = (await GenerationService(models_of(None, cluster=hybrid), None).ListRanks(None, None)).ranks
    assert [(rank.index_blocks, rank.resumable_blocks) for rank in ranks] == [(6, 1), (5, 1)]
    assert ranks[0].trust == 1.0 and ranks[0].resume_trust < 0.5 and ranks[1].resume_trust == 1.0


async def test_of_full_attention_alone_nothing_of_the_kind_is_said(two_decodes):
    two_decodes.prompt = await two_decodes.hash(array("I", range(PROMPT_TOKENS)), "")
    answer = await explanation(two_decodes)
    assert answer.carried_bytes == 0
    assert not any(candidate.HasField("decode_resume_tokens") for candidate in answer.candidates)
    assert not any(term.name == "carried" for candidate in answer.candidates for term in candidate.terms)
    ranks = (await GenerationService(models_of(None, cluster=two_decodes), None).ListRanks(None, None)).ranks
    assert len(ranks) == 3 and not any(rank.HasField("resumable_blocks") for rank in ranks)


async def test_prometheus_is_told_what_was_promised_and_found_by_kind(hybrid, mirror, balance, clock):
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    registry.register(RankCollector(hybrid, mirror))
    found = {Plan.REMOTE: admitted(Plan.REMOTE, 90, 48), Plan.LOCAL: admitted(Plan.LOCAL, 16)}
    for plan, what in found.items():
        hybrid._known_plans = frozenset({plan})
        metrics.admitted(hybrid.place(hybrid.prompt, "", frozenset()), what)
    balance.resume_trust.observe(D0_KEY, 10_000, 0, clock[0])

    def tokens(which: str, role: str, kind: str) -> float | None:
        labels = {"role": role, "worker": role, "rank": "0", "kind": kind}
        return registry.get_sample_value(f"isthmus_{which}_hit_tokens_total", labels)

    for role, kind, predicted, delivered in (
        ("decode", "held", 96, 90),
        ("decode", "resumable", 32, 16),
        ("prefill", "resumable", 64, 48),
    ):
        assert (tokens("predicted", role, kind), tokens("delivered", role, kind)) == (predicted, delivered)
        assert tokens("available", role, kind) == predicted
    assert tokens("predicted", "prefill", "held") is None

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"role": "decode", "worker": "decode", "rank": "0", **labels})

    assert (value("isthmus_index_rank_blocks"), value("isthmus_index_rank_resumable_blocks")) == (6, 1)
    assert value("isthmus_rank_trust", kind="held") == 1.0
    assert value("isthmus_rank_trust", kind="resumable") < 0.5
