"""These tests show how a rank's requests are counted."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from services.rank.rank_metrics import (
    DecodeMetrics,
    DigestMetrics,
    HandOverMetrics,
    PoolCollector,
    PrefillMetrics,
    RequestMetrics,
)
from services.values.errors import KvCorrupt, NoCapacity, PeerFailed
from services.values.kv import KvPath, KvPathKind
from services.values.rank import Plan, TakenOver
from services.values.rank_reports import CarriedPool, ConstraintCounts, DraftCount, RankLoad
from services.values.request import Admitted, PrefillResult, Pulled


def test_ends_of_requests_are_counted(subtests):
    for ends_with, outcome in [
        (None, "finished"),
        (asyncio.CancelledError(), "cancelled"),
        (TimeoutError(), "DeadlineExceeded"),
        (NoCapacity("full"), "NoCapacity"),
        (PeerFailed("gone"), "PeerFailed"),
    ]:
        with subtests.test(ends_with=ends_with, outcome=outcome):
            registry = CollectorRegistry()
            metrics = RequestMetrics(registry)
            assert registry.get_sample_value("isthmus_rank_requests_total", {"outcome": "finished"}) == 0
            try:
                with metrics.counted():
                    if ends_with is not None:
                        raise ends_with
            except BaseException as error:
                assert error is ends_with
            assert registry.get_sample_value("isthmus_rank_requests_total", {"outcome": outcome}) == 1
            failed = registry.get_sample_value("isthmus_transfer_failures_total")
            assert failed == isinstance(ends_with, PeerFailed)
    for error in [KvCorrupt("changed"), PeerFailed("gone")]:
        with subtests.test(error=error):
            registry = CollectorRegistry()
            metrics = DecodeMetrics(registry, SimpleNamespace(load=RankLoad))
            with pytest.raises(PeerFailed), metrics.counted():
                raise error
            assert registry.get_sample_value("isthmus_transfer_failures_total") == 1
            mismatches = registry.get_sample_value("isthmus_kv_digest_mismatches_total")
            assert mismatches == isinstance(error, KvCorrupt)


def test_bytes_that_are_carried_are_counted_by_kind():
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry, SimpleNamespace(load=RankLoad))
    for carried in ({"recurrent": 500}, {"recurrent": 500, "sliding_window": 30}, {}):
        admitted = Admitted(9, 0, 0, 9, 1000, 1000, 0.0, 0.0, 0.0, 0.0, Plan.REMOTE, carried_bytes=carried)
        metrics.admitted(admitted, None)

    def value(kind):
        return registry.get_sample_value("isthmus_decode_carried_bytes_total", {"kind": kind})

    assert (value("recurrent"), value("sliding_window"), value("chunked_window")) == (1000, 30, None)
    assert registry.get_sample_value("isthmus_decode_received_bytes_total") == 3000


def test_what_came_changed_is_a_mismatch_whoever_pulled_it():
    corrupt, decode, prefill = Pulled(0, 0, 0.1, "corrupt"), CollectorRegistry(), CollectorRegistry()
    of_decode = DecodeMetrics(decode, SimpleNamespace(load=RankLoad))
    admitted = Admitted(100, 0, 0, 100, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL, pulled=corrupt)
    of_decode.admitted(admitted, None)
    of_prefill = PrefillMetrics(prefill, SimpleNamespace(load=RankLoad))
    of_prefill.prefilled(PrefillResult(7, None, 0, 100, pulled=corrupt), None)
    successor = CollectorRegistry()
    HandOverMetrics(successor, DigestMetrics(successor)).took(TakenOver(0, 64, refused="corrupt"))
    for registry in (decode, prefill, successor):
        assert registry.get_sample_value("isthmus_kv_digest_mismatches_total") == 1


def test_pages_that_were_compared_are_counted_whoever_asked_for_them():
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry, SimpleNamespace(load=RankLoad))
    times, pulled = (0.0, 0.0, 0.0, 0.0), Pulled(64, 4096, 0.01, digested_pages=4)
    metrics.admitted(Admitted(9, 0, 0, 9, 0, 0, *times, Plan.REMOTE, digested_pages=2), None)
    metrics.admitted(Admitted(72, 64, 0, 8, 0, 0, *times, Plan.LOCAL, pulled=pulled), None)
    HandOverMetrics(registry, metrics.digests).took(TakenOver(64, 64, 64, 4096, digested_pages=8))
    assert registry.get_sample_value("isthmus_kv_digested_pages_total") == 14


def test_pulls_are_counted_where_they_were_asked_for():
    """What was pulled is in no cache of the rank's own; under plan remote it is prefill's to count."""
    came, refused = Pulled(64, 4096, 0.01, "", 64), Pulled(0, 0, 0.3, "late")
    decode, prefill = CollectorRegistry(), CollectorRegistry()
    of_decode = DecodeMetrics(decode, SimpleNamespace(load=lambda: RankLoad(granted_pages=3)))
    of_prefill = PrefillMetrics(prefill, SimpleNamespace(load=RankLoad))
    for plan, pulled in ((Plan.LOCAL, came), (Plan.REMOTE, came), (Plan.LOCAL, refused), (Plan.LOCAL, None)):
        admitted = Admitted(100, 80, 0, 20, 0, 0, 0.0, 0.0, 0.0, 0.0, plan, pulled=pulled)
        of_decode.admitted(admitted, None)
    for pulled in (came, None):
        of_prefill.prefilled(PrefillResult(7, None, 80, 20, pulled=pulled), None)
    for registry, late, prefix in ((decode, 1, 4 * 80 - 64), (prefill, None, 2 * 80 - 64)):
        value = registry.get_sample_value
        assert value("isthmus_pulls_total", {"outcome": "pulled"}) == 1
        assert value("isthmus_pulls_total", {"outcome": "late"}) == late
        assert (value("isthmus_pulled_tokens_total"), value("isthmus_pulled_bytes_total")) == (64, 4096)
        assert value("isthmus_pull_seconds_count") == 1 + (late or 0)
        role = "decode" if registry is decode else "prefill"
        assert value(f"isthmus_{role}_prefix_tokens_total") == prefix
    assert decode.get_sample_value("isthmus_granted_pages") == 3


def test_what_pools_show(subtests):
    with subtests.test("pools beside full attention and checkpoints are shown"):
        registry = CollectorRegistry()
        carried = (CarriedPool(1, "sliding_window", 10, 4), CarriedPool(2, "recurrent", 3, 3))
        registry.register(PoolCollector(lambda: RankLoad(carried=carried, checkpoints=2, evicted_points=5)))
        labels = {"group": "1", "kind": "sliding_window", "state": "used"}
        assert registry.get_sample_value("isthmus_carried_units", labels) == 6
        labels = {"group": "2", "kind": "recurrent", "state": "free"}
        assert registry.get_sample_value("isthmus_carried_units", labels) == 3
        for name in ("checkpoints", "resume_points"):
            assert registry.get_sample_value(f"isthmus_{name}") == 2
            assert registry.get_sample_value(f"isthmus_evicted_{name}_total") == 5
    with subtests.test("drafts are counted by source"):
        drafts = (DraftCount("draft", 10, 8), DraftCount("lookup", 5, 0))
        registry = CollectorRegistry()
        registry.register(PoolCollector(lambda: RankLoad(drafts=drafts, tokens_per_step=2.5)))

        def value(name, source):
            return registry.get_sample_value(f"isthmus_{name}_tokens_total", {"source": source})

        assert (value("drafted", "draft"), value("accepted_draft", "draft")) == (10, 8)
        assert (value("drafted", "lookup"), value("accepted_draft", "lookup")) == (5, 0)
        assert registry.get_sample_value("isthmus_tokens_per_step") == 2.5
    with subtests.test("what constraints took is counted"):
        registry = CollectorRegistry()
        constraints = ConstraintCounts(5, 2, 0.25, 40, 0.5)
        registry.register(PoolCollector(lambda: RankLoad(constraints=constraints)))
        names = ("rank_constrained_requests", "compiled_constraints", "constraint_compile_seconds")
        values = [registry.get_sample_value(f"isthmus_{name}_total") for name in names]
        assert values == [5, 2, 0.25]
        assert registry.get_sample_value("isthmus_masked_tokens_total") == 40
        assert registry.get_sample_value("isthmus_mask_seconds_total") == 0.5
    with subtests.test("each way of kv is a series once it is known"):
        paths = []
        registry = CollectorRegistry()
        registry.register(PoolCollector(lambda: RankLoad(kv_paths=tuple(paths))))

        def value(kind, reach, lanes):
            return registry.get_sample_value(
                "isthmus_kv_path", {"kind": kind, "reach": reach, "lanes": lanes}
            )

        assert value("tcp", "inter-node", "tcp/eth0") is None
        paths += [
            KvPath(KvPathKind.TCP, "inter-node", "tcp/eth0"),
            KvPath(KvPathKind.SHARED_MEMORY, "intra-node", "cma/memory"),
        ]
        assert (
            value("tcp", "inter-node", "tcp/eth0") == value("shared_memory", "intra-node", "cma/memory") == 1
        )
    for expected in [False, True]:
        with subtests.test(expected=expected):
            registry = CollectorRegistry()
            PrefillMetrics(registry, SimpleNamespace(load=RankLoad), expects_rdma=expected)
            assert registry.get_sample_value("isthmus_kv_rdma_expected") == expected
