"""These tests show what routers and ranks show Prometheus of requests whose course is known."""

import asyncio
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from cluster.harness import FakeCluster, ids_request
from cluster.metrics_page import samples, value
from services.rank.rank_metrics import DecodeMetrics, PrefillMetrics
from services.router.request.router_metrics import RouterMetrics
from services.router.request.stages import STAGES
from services.router.router_config import RouterConfig
from services.values.rank_reports import RankLoad
from services.wire.isthmus.v1 import generation_pb2

PROMPT = [(11 * i) % 500 for i in range(40)]


async def test_two_turns_are_accounted_for_on_every_side(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        tokens, first = await cluster.generate(PROMPT, conversation_id="c")
        # It comes back changed from its third generated token on: those after it have drifted.
        turn = [*PROMPT, *tokens[:2], 499, 3, 2, 1]
        _, second = await cluster.generate(turn, conversation_id="c")
        router = await samples(cluster.routers[0], cluster)
        decode = await samples(cluster.ranks["decode-0/0"], cluster)
        prefill = await samples(cluster.ranks["prefill-0/0"], cluster)
    usages = (first.usage, second.usage)
    assert second.usage.drift_tokens > 0 and second.usage.decode_prefix_len > 0

    def total(name):
        return sum(getattr(usage, name) for usage in usages)

    assert value(router, "isthmus_requests_total", outcome="finished") == 2
    assert value(router, "isthmus_ttft_seconds_count") == value(router, "isthmus_request_seconds_count") == 2
    for stage in STAGES:
        assert value(router, "isthmus_ttft_stage_seconds_count", stage=stage) == 2
    of_stages = value(router, "isthmus_ttft_stage_seconds_sum")
    assert of_stages == pytest.approx(value(router, "isthmus_ttft_seconds_sum"), rel=0.05)
    assert value(router, "isthmus_requests_received_total") == 2
    assert value(router, "isthmus_abandoned_seconds_count") == 0
    for kind, tokens_of in (("prompt", "prompt_tokens"), ("output", "completion_tokens")):
        lengths = [getattr(usage, tokens_of) for usage in usages]
        assert value(router, f"isthmus_request_{kind}_tokens_count") == 2
        assert value(router, f"isthmus_request_{kind}_tokens_sum") == sum(lengths)
        short = [length for length in lengths if length <= 32]
        assert value(router, f"isthmus_request_{kind}_tokens_bucket", le="32.0") == len(short)
    for page in (router, decode, prefill):
        assert {dict(labels)["model"] for _, *labels in page} == {cluster.base.served_name}
    asked_for = {"gen_ai_operation_name": "text_completion", "gen_ai_request_model": "fake"}
    for name in ("time_to_first_token", "request_duration", "time_per_output_token"):
        assert value(router, f"gen_ai_server_{name}_seconds_count", **asked_for) == 2
    per_token_s = value(router, "gen_ai_server_time_per_output_token_seconds_sum")
    assert 0 < per_token_s < value(router, "isthmus_request_seconds_sum")
    assert value(router, "isthmus_build_info", engine="none", version=version("isthmus")) == 1
    assert value(decode, "isthmus_build_info", engine="fake", nixl=version("nixl")) == 1
    assert value(router, "isthmus_itl_seconds_count") == total("completion_tokens") - 2
    for name in ("prompt", "completion", "computed", "reused", "drift"):
        assert value(router, f"isthmus_{name}_tokens_total") == total(f"{name}_tokens")
    assert value(router, "isthmus_kv_moved_bytes_total") == total("kv_bytes_moved")
    assert value(router, "isthmus_kv_saved_bytes_total") == total("kv_bytes_saved")
    assert value(router, "isthmus_placements_total", plan="remote") == 2
    for role, worker, kind, held in (
        ("decode", "decode-0", "held", total("decode_prefix_len")),
        ("prefill", "prefill-0", "resumable", total("prefill_prefix_len")),
    ):
        rank = {"role": role, "worker": worker, "rank": "0"}
        of_kind = {**rank, "kind": kind}
        assert value(router, "isthmus_placed_prompt_tokens_total", **of_kind) == total("prompt_tokens")
        assert value(router, "isthmus_delivered_hit_tokens_total", **of_kind) == held
        assert value(router, "isthmus_available_hit_tokens_total", **of_kind) >= held
        assert value(router, "isthmus_rank_up", **rank) == 1
        assert 0 < value(router, "isthmus_index_rank_staleness_seconds", **rank) < 60
    assert value(decode, "isthmus_decode_prefix_tokens_total", rank="0") == total("decode_prefix_len")
    assert value(decode, "isthmus_decode_generated_tokens_total") == total("completion_tokens")
    assert value(decode, "isthmus_decode_received_bytes_total") == total("kv_bytes_moved")
    decode_steps = value(decode, "isthmus_engine_step_seconds_count", kind="decode")
    assert 0 < decode_steps <= total("completion_tokens")
    assert value(decode, "isthmus_engine_step_seconds_bucket", kind="decode", le="+Inf") == decode_steps
    assert value(decode, "isthmus_engine_step_seconds_count", kind="prompt") == 0
    assert value(prefill, "isthmus_engine_step_seconds_count", kind="prompt") > 0
    assert value(prefill, "isthmus_engine_step_seconds_sum", kind="prompt") > 0
    assert value(prefill, "isthmus_prefill_sent_bytes_total") == total("kv_bytes_moved")
    assert value(prefill, "isthmus_prefill_computed_tokens_total") == total("computed_tokens")
    for rank in (decode, prefill):
        assert value(rank, "isthmus_rank_requests_total", outcome="finished") == 2
        assert value(rank, "isthmus_transfer_failures_total") == 0


async def test_tokens_so_far_and_refusals_are_counted(etcd_endpoint, model_dir, cluster_name, subtests):
    with subtests.test("the tokens of a stream that runs are counted"):
        cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), fake_step_s=0.02)
        async with cluster:
            call = cluster.stubs[0].Generate(ids_request(PROMPT, 400))
            read = sum([len((await call.read()).token_ids) for _ in range(5)])
            router = await samples(cluster.routers[0], cluster)
            call.cancel()
        assert read and value(router, "isthmus_completion_tokens_total") >= read
        assert value(router, "isthmus_request_seconds_count") == 0
    with subtests.test("a refusal at the door is counted and not timed"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,)) as cluster:
            for fields in ({"model": "gpt-9"}, {"request_id": "x" * 999}):
                with pytest.raises(grpc.aio.AioRpcError):
                    await cluster.generate(PROMPT, **fields)
            with pytest.raises(grpc.aio.AioRpcError):
                await cluster.generate([10**6])
            router = await samples(cluster.routers[0], cluster)
        assert value(router, "isthmus_rejections_total", reason="NotFound") == 1
        assert value(router, "isthmus_rejections_total", reason="InvalidRequest") == 2
        assert value(router, "isthmus_ttft_seconds_count") == 0
        assert value(router, "isthmus_requests_received_total") == 3


def test_histograms_reach_as_far_as_a_request_may_wait():
    """Beyond its last edge a histogram says nothing: the quantiles of panels end there."""
    engine, edges = SimpleNamespace(load=RankLoad), defaultdict(float)
    for registry, make in (
        (CollectorRegistry(), RouterMetrics),
        (CollectorRegistry(), partial(DecodeMetrics, engine=engine)),
        (CollectorRegistry(), partial(PrefillMetrics, engine=engine)),
    ):
        make(registry)
        for sample in (sample for family in registry.collect() for sample in family.samples):
            edge = sample.labels.get("le", "+Inf")
            if edge != "+Inf" and not sample.name.startswith("gen_ai_"):  # theirs are given
                edges[sample.name] = max(edges[sample.name], float(edge))
    assert edges.pop("isthmus_itl_seconds_bucket") == 5.0  # of one step
    assert edges.pop("isthmus_engine_step_seconds_bucket") == 30.0
    assert edges.pop("isthmus_pull_seconds_bucket") == 30.0  # no source is waited for longer
    for name in ("prompt", "output"):
        assert edges.pop(f"isthmus_request_{name}_tokens_bucket") == 2**20
    config = RouterConfig(model="m")
    assert edges["isthmus_request_seconds_bucket"] >= config.request_timeout_s
    assert len(edges) == 8 and min(edges.values()) >= config.max_wait_s


@pytest.mark.long
async def test_requests_that_wait_and_that_move_are_counted(etcd_endpoint, model_dir, cluster_name, subtests):
    with subtests.test("a request that waits is counted and one that is given up is timed"):
        # So that goals for the first token can count those that never get one.
        cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), fake_prompt_token_s=0.01)
        async with cluster:
            call = cluster.stubs[0].Generate(ids_request([3] * 1000))  # ten seconds of prefill
            router = await until(cluster, "isthmus_requests_received_total")
            assert value(router, "isthmus_abandoned_seconds_count") == 0
            assert value(router, "isthmus_ttft_seconds_count") == 0
            call.cancel()
            await until(cluster, "isthmus_abandoned_seconds_count")
            stopped = asyncio.create_task(cluster.generate([4] * 1000, request_id="mine"))
            await until(cluster, "isthmus_router_running_requests", unless=stopped)
            await cluster.stubs[0].Abort(generation_pb2.AbortRequest(request_id="mine"))
            await stopped
            router = await until(cluster, "isthmus_abandoned_seconds_count", 2)
        assert value(router, "isthmus_requests_received_total") == 2
        for mistake in (
            "InvalidRequest",
            "NotFound",
            "AlreadyRunning",
            "Forbidden",
        ):  # series from the start: rates are right
            assert value(router, "isthmus_rejections_total", reason=mistake) == 0
    with subtests.test("a lost rank shows as a move and as down"):
        cluster = FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1, 1), fake_step_s=0.02)
        async with cluster:
            call = cluster.stubs[0].Generate(ids_request(PROMPT, 60))
            assert (await call.read()).token_ids  # it has its first token
            where = [name for name, rank in cluster.ranks.items() if name.startswith("decode") and busy(rank)]
            await cluster.ranks[where[0]].server.stop(0)  # still registered
            while await call.read() is not grpc.aio.EOF:
                pass
            router = await samples(cluster.routers[0], cluster)
        assert value(router, "isthmus_request_moves_total", kind="migration") == 1
        assert value(router, "isthmus_request_moves_total", kind="retry") == 0
        assert value(router, "isthmus_rank_up", worker=where[0].split("/")[0]) == 0
        assert value(router, "isthmus_rank_up", role="decode") == 1
        assert value(router, "isthmus_prompt_tokens_total") == len(PROMPT)  # billed once


async def until(cluster, name, least=1, unless=None):
    """The router's samples, once that one has come so far, and before `unless` ends."""
    async with asyncio.timeout(10):
        while value(router := await samples(cluster.routers[0], cluster), name) < least:
            assert unless is None or not unless.done(), unless
            await asyncio.sleep(0.01)
    return router


def busy(rank):
    return rank.engine.load().running > 0


async def test_exemplars_lead_to_the_trace(etcd_endpoint, model_dir, cluster_name, spans):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        await cluster.generate(PROMPT)
        pages = [
            await samples(part, cluster)
            for part in (cluster.routers[0], cluster.ranks["decode-0/0"], cluster.ranks["prefill-0/0"])
        ]
    (trace,) = {f"{span.context.trace_id:032x}" for span in spans.get_finished_spans()}
    for page, name in zip(
        pages,
        ("isthmus_ttft_seconds", "isthmus_decode_transfer_seconds", "isthmus_prefill_compute_seconds"),
        strict=True,
    ):
        exemplars = [s.exemplar for key, s in page.items() if key[0] == f"{name}_bucket" and s.exemplar]
        assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": trace}]
