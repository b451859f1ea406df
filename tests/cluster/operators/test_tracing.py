"""One request is one trace, whichever way it ends; and without an exporter nothing is recorded."""

import asyncio
import logging

import grpc
import httpx
import pytest
from opentelemetry.trace import StatusCode

from cluster.harness import FakeCluster, ids_request
from services.observe import traces

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METADATA = ((traces.TRACEPARENT, f"00-{TRACE}-{CALLER}-01"),)
PROMPT = [(11 * i) % 500 for i in range(21)]
ROUTER, DECODE, PREFILL = "router.generate", "decode.generate", "prefill.prefill"


async def spans_of(exporter, **wanted):
    """{name: spans in the order in which they began}, once there are as many as wanted of each."""
    async with asyncio.timeout(10):
        while True:
            found = {ROUTER: [], DECODE: [], PREFILL: []}
            for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time):
                found[span.name].append(span)
            if all(len(found[name]) >= count for name, count in wanted.items()):
                return found
            await asyncio.sleep(0.01)


async def one_of_each(exporter):
    found = await spans_of(exporter, **{ROUTER: 1, DECODE: 1, PREFILL: 1})
    assert all(len(spans) == 1 for spans in found.values())
    return [found[name][0] for name in (ROUTER, DECODE, PREFILL)]


def check_chain(*spans, trace=None, caller=None):
    """Each is the parent of the next one, in one trace."""
    assert len({span.context.trace_id for span in spans}) == 1
    assert [span.parent.span_id for span in spans[1:]] == [span.context.span_id for span in spans[:-1]]
    if trace is None:
        assert spans[0].parent is None
    else:
        assert f"{spans[0].context.trace_id:032x}" == trace
        assert f"{spans[0].parent.span_id:016x}" == caller


def without_times(span):
    """Attributes, without those that differ from run to run."""
    return {name: v for name, v in span.attributes.items() if not name.endswith(("_s", "request_id"))}


async def answer(cluster, request, **call):
    """The Finish of a request."""
    async for response in cluster.stubs[0].Generate(request, timeout=20, **call):
        last = response
    return last.finish


async def test_one_trace_with_the_prices_of_the_log_line(
    etcd_endpoint, model_dir, cluster_name, spans, caplog, subtests
):
    with subtests.test("the log line has the prices of the trace"):
        caplog.set_level(logging.INFO, "services.router.request.story")
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
            await cluster.generate(PROMPT)
            router, *_ = await one_of_each(spans)
        priced = {
            name.removeprefix("route.").removesuffix("_s"): f"{1e3 * seconds:.2f}"
            for name, seconds in router.attributes.items()
            if name.startswith("route.") and name != "route.total_s" and seconds
        }
        (line,) = [
            record.getMessage() for record in caplog.records if "request_finished" in record.getMessage()
        ]
        (terms,) = [word.removeprefix("terms_ms=") for word in line.split() if word.startswith("terms_ms=")]
        assert priced and dict(term.split(":") for term in terms.split(",")) == priced
    with subtests.test("requests are a trace each"):
        spans.clear()
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1") as cluster:
            with subtests.test("a request is one trace from the client on"):
                await cluster.generate(PROMPT, conversation_id="c")
                await one_of_each(spans)
                spans.clear()
                request = ids_request([*PROMPT, 1, 2, 3], request_id="mine", conversation_id="c")
                finish = await answer(cluster, request, metadata=METADATA)
                router, decode, prefill = await one_of_each(spans)
                check_chain(router, decode, prefill, trace=TRACE, caller=CALLER)
                usage, placement = finish.usage, finish.placement
                told = dict(router.attributes)
                terms = {name for name in told if name.startswith(("route.", "stage."))}
                assert {"route.wait_prefill_s", "route.compute_s", "route.itl_s"} <= terms
                route = {name for name in terms if name.startswith("route.")}
                assert told["route.total_s"] == pytest.approx(sum(told[t] for t in route - {"route.total_s"}))
                told.pop("degraded", None)  # etcd may still be being listed
                for role in (
                    "decode",
                    "prefill",
                ):  # the index may be behind; what was sent counts all the same
                    assert told.pop(f"indexed_{role}_prefix_len") <= told[f"predicted_{role}_prefix_len"]
                conventional = {name: told.pop(name) for name in tuple(told) if name.startswith("gen_ai.")}
                assert conventional.pop("gen_ai.response.time_to_first_chunk") == told["first_token_s"]
                assert conventional == {
                    "gen_ai.operation.name": "text_completion",
                    "gen_ai.provider.name": "isthmus",
                    "gen_ai.conversation.id": "c",
                    "gen_ai.request.model": "fake",
                    "gen_ai.request.max_tokens": 8,
                    "gen_ai.request.temperature": 0,
                    "gen_ai.response.id": "mine",
                    "gen_ai.response.model": "fake",
                    "gen_ai.response.finish_reasons": ("length",),
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.reused_tokens,
                }
                assert {name: told[name] for name in told if name not in {*terms, "first_token_s"}} == {
                    "request_id": "mine",
                    "outcome": "finished",
                    "attempts": 1,
                    "placements": 1,
                    "answers": 1,
                    "completion_tokens": 8,
                    "reasoning_tokens": 0,
                    "tool_calls": 0,
                    "broken_tool_calls": 0,
                    "decode": f"{placement.decode.worker}/{placement.decode.rank}",
                    "prefill": "prefill-0/0",
                    "plan": "remote",
                    "reason": "pinned",
                    "pinned": f"{placement.decode.worker}/{placement.decode.rank}",
                    "predicted_decode_prefix_len": placement.predicted_prefix_len,
                    "predicted_prefill_prefix_len": 20,
                    "predicted_reused_tokens": placement.predicted_reused_tokens,
                    "prompt_tokens": usage.prompt_tokens,
                    "decode_prefix_len": usage.decode_prefix_len,
                    "prefill_prefix_len": usage.prefill_prefix_len,
                    "kv_bytes_moved": usage.kv_bytes_moved,
                }
                assert usage.decode_prefix_len > 0 and usage.kv_bytes_moved > 0
                assert decode.attributes["request_id"].startswith("mine")
                assert without_times(decode) == {
                    "outcome": "finished",
                    "rank": told["decode"],
                    "plan": "remote",
                    "prompt_tokens": usage.prompt_tokens,
                    "decode_prefix_len": usage.decode_prefix_len,
                    "kv_bytes_moved": usage.kv_bytes_moved,
                }
                assert prefill.attributes["request_id"] == decode.attributes["request_id"]
                assert without_times(prefill) == {
                    "outcome": "finished",
                    "rank": "prefill-0/0",
                    "prefill_prefix_len": usage.prefill_prefix_len,
                    "computed_tokens": usage.computed_tokens,
                    "kv_bytes_moved": usage.kv_bytes_moved,
                }
                assert all(s.status.status_code is StatusCode.UNSET for s in (router, decode, prefill))
            with subtests.test("requests at once keep apart"):
                spans.clear()
                await asyncio.gather(*(cluster.generate([i, *PROMPT], request_id=f"r{i}") for i in range(8)))
                found = await spans_of(spans, **{ROUTER: 8, DECODE: 8, PREFILL: 8})
                below = {span.parent.span_id: span for name in (DECODE, PREFILL) for span in found[name]}
                for router in found[ROUTER]:
                    decode = below[router.context.span_id]
                    prefill = below[decode.context.span_id]
                    check_chain(router, decode, prefill)
                    assert decode.attributes["request_id"].startswith(router.attributes["request_id"])
                    assert prefill.attributes["request_id"].startswith(router.attributes["request_id"])
                assert len({router.context.trace_id for router in found[ROUTER]}) == 8


async def test_over_http_and_under_plan_local_too(etcd_endpoint, model_dir, cluster_name, spans, subtests):
    with subtests.test("an http request is one trace as well"):
        cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,))
        async with cluster, httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{cluster.routers[0].http_port}/v1/completions"
            for stream in (False, True):
                body = {"prompt": PROMPT, "max_tokens": 3, "stream": stream}
                assert (await http.post(url, json=body, headers=dict(METADATA))).status_code == 200
                check_chain(*await one_of_each(spans), trace=TRACE, caller=CALLER)
                spans.clear()
    with subtests.test("the local plan has no prefill span"):
        spans.clear()
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", plans=("local",)) as cluster:
            await cluster.generate(PROMPT)
            found = await spans_of(spans, **{ROUTER: 1, DECODE: 1})
            check_chain(found[ROUTER][0], found[DECODE][0])
            assert not found[PREFILL]
            assert found[ROUTER][0].attributes["plan"] == found[DECODE][0].attributes["plan"] == "local"
            assert "prefill" not in found[ROUTER][0].attributes


@pytest.mark.long
async def test_the_spans_of_requests_that_do_not_finish(
    etcd_endpoint, model_dir, cluster_name, spans, subtests
):
    with subtests.test("a client that leaves ends every span"):
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_prompt_token_s=0.005) as cluster:
            # While prefill computes, for 0.16 s a chunk: it is cancelled all the way down.
            call = cluster.stubs[0].Generate(ids_request([3] * 1000))
            prefill = cluster.ranks["prefill-0/0"].engine
            async with asyncio.timeout(10):
                while not prefill.load().books.private:
                    await asyncio.sleep(0.005)
            call.cancel()
            chain = await one_of_each(spans)
            check_chain(*chain)
            assert [span.attributes["outcome"] for span in chain] == ["cancelled"] * 3
            assert all(span.status.status_code is StatusCode.UNSET for span in chain)
            spans.clear()
            # While it decodes: prefill has done its part.
            call = cluster.stubs[0].Generate(ids_request([5, 4], 1500))
            await call.read()
            call.cancel()
            router, decode, prefilled = await one_of_each(spans)
            outcomes = [span.attributes["outcome"] for span in (router, decode, prefilled)]
            assert outcomes == ["cancelled", "cancelled", "finished"]
            assert router.attributes["completion_tokens"] >= 1
            await cluster.assert_nothing_held()
    with subtests.test("errors are the spans status"):
        spans.clear()
        cluster = FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,), fake_step_s=0.02)
        async with cluster:
            with pytest.raises(grpc.aio.AioRpcError):
                await cluster.generate(PROMPT, model="gpt-9")
            (router,) = (await spans_of(spans, **{ROUTER: 1}))[ROUTER]
            assert router.status.status_code is StatusCode.ERROR
            assert "gpt-9" in router.status.description
            assert router.attributes["outcome"] == "NotFound"
            spans.clear()
            with pytest.raises(grpc.aio.AioRpcError):
                await cluster.generate(PROMPT, 1500, timeout=1.0)
            router, decode, _ = await one_of_each(spans)
            # The client's own clock may end the call before the services' clocks do.
            assert router.attributes["outcome"] in ("DeadlineExceeded", "cancelled")
            assert decode.attributes["outcome"] in ("TimeoutError", "cancelled")


async def test_a_retry_is_a_second_decode_span(
    etcd_endpoint, model_dir, cluster_name, spans, first_prefill_looks_cheaper
):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(1, 1), decode=(1,)) as cluster:
        # It stays registered and answers no more, until a request finds out.
        await cluster.ranks["prefill-0/0"].server.stop()
        await cluster.generate(PROMPT)
        found = await spans_of(spans, **{ROUTER: 1, DECODE: 2, PREFILL: 1})
        (router,), (failed, served), (prefill,) = (found[name] for name in (ROUTER, DECODE, PREFILL))
        check_chain(router, failed)
        check_chain(router, served, prefill)
        assert (failed.attributes["outcome"], failed.status.status_code) == ("PeerFailed", StatusCode.ERROR)
        assert (router.attributes["outcome"], router.attributes["prefill"]) == ("finished", "prefill-1/0")
        event, _ = router.events
        assert (event.name, event.attributes["rank"]) == ("rank_failed", "prefill-0/0")


async def test_without_an_exporter_nothing_is_recorded(etcd_endpoint, model_dir, cluster_name, monkeypatch):
    started = []

    class Watched:
        def __init__(self, tracer):
            self.tracer = tracer

        def start_span(self, *arguments):
            started.append(self.tracer.start_span(*arguments))
            return started[-1]

    tracer = traces.tracer
    monkeypatch.setattr(traces, "tracer", lambda: Watched(tracer()))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        await answer(cluster, ids_request(PROMPT), metadata=METADATA)
        assert len(started) == 3 and not any(span.is_recording() for span in started)
        # The client's trace goes through all the same, for whoever records further on.
        assert {traces.traceparent(span) for span in started} == {METADATA[0][1]}
        started.clear()
        await answer(cluster, ids_request(PROMPT))
        assert len(started) == 3 and {traces.traceparent(span) for span in started} == {""}
