"""A request through real processes is one trace in a collector; its stages are its time to first token."""

import itertools
import time

import pytest

from cluster.harness import ids_request
from observe.otlp_collector import running_collector
from processes.harness import ProcessCluster, prompt_of, until

_PROMPT_TOKEN_S = 0.01
_ROUNDING_S = 1e-6
_CLOCKS_DIFFER_S = 0.001  # a span's ends are wall-clock times, stages are not
_AT_DECODE = ("decode_queue_s", "prefill_queue_s", "prefill_compute_s", "transfer_s", "first_decode_step_s")
_SERVICES = ("router.generate", "decode.generate", "prefill.prefill")


async def traced_request(cluster, collector, ids, request_id):
    """The Finish, the client's time to the first token, and of the request's spans by name the attributes and
    how long it lasted."""
    began, first_token_s = time.monotonic(), None
    async for response in cluster.stubs[0].Generate(ids_request(ids, request_id=request_id), timeout=60):
        if first_token_s is None:
            first_token_s = time.monotonic() - began
        finish = response.finish

    def mine():
        spans = [item for item in collector.spans() if item[2]["request_id"].startswith(request_id)]
        return spans if len(spans) == len(_SERVICES) else None

    spans = await until(mine, "every service's span is there")
    assert len({span.trace_id for _, span, _ in spans}) == 1
    chain = {span.name: (service, span) for service, span, _ in spans}
    assert tuple(chain[name][0] for name in _SERVICES) == ("router", "decode", "prefill")
    instances = {told["service.name"]: told["service.instance.id"] for told in collector.resources()}
    assert set(instances) == {"router", "decode", "prefill"} and instances["decode"].endswith("/0")
    for parent, child in itertools.pairwise(_SERVICES):
        assert chain[child][1].parent_span_id == chain[parent][1].span_id
    by_name = {span.name: attributes | {"span_s": seconds_of(span)} for _, span, attributes in spans}
    return finish, first_token_s, by_name


def seconds_of(span):
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def check_stages(finish, client_s, spans, computed_tokens):
    router, decode, prefill = (spans[name] for name in _SERVICES)
    stages = {name: value for name, value in router.items() if name.startswith("stage.")}
    assert len(stages) == 10 and all(value >= 0 for value in stages.values())
    # What somebody waited beside what others say that they took is a stage too, and never less than nothing:
    # the sum is more than the whole where somebody says that it took longer than whoever asked it waited.
    assert abs(sum(stages.values()) - router["first_token_s"]) <= _ROUNDING_S
    assert prefill["queue_s"] + prefill["compute_s"] <= prefill["span_s"] + _CLOCKS_DIFFER_S
    at_decode = sum(stages[f"stage.{name}"] for name in _AT_DECODE)
    assert at_decode <= decode["span_s"] + _CLOCKS_DIFFER_S
    at_router = stages["stage.tokenize_s"] + stages["stage.route_s"]
    assert at_decode + at_router <= router["span_s"] + _CLOCKS_DIFFER_S
    assert router["first_token_s"] <= client_s
    assert stages["stage.prefill_compute_s"] == prefill["compute_s"] >= computed_tokens * _PROMPT_TOKEN_S
    assert stages["stage.prefill_queue_s"] == prefill["queue_s"]
    for name in ("decode_queue_s", "transfer_s", "first_decode_step_s"):
        assert stages[f"stage.{name}"] == decode[name]
    for name, value in stages.items():
        assert getattr(finish.stages, name.removeprefix("stage.")) == value


@pytest.mark.long
async def test_the_stages_of_one_trace_add_up(tmp_path, model_dir):
    with running_collector() as collector:
        cluster = ProcessCluster(
            tmp_path,
            model_dir,
            decode_dp_size=1,
            rank_flags=(
                f"--fake-prompt-token-s={_PROMPT_TOKEN_S}",
                f"--otlp-endpoint={collector.endpoint}",
            ),
            router_flags=(f"--otlp-endpoint={collector.endpoint}",),
        )
        async with cluster:
            ids = prompt_of(1, 60)
            finish, client_s, spans = await traced_request(cluster, collector, ids, "first")
            check_stages(finish, client_s, spans, 60)
            # The second turn: what is held moves no more, and all three say the same of it.
            ids = [*ids, *prompt_of(2, 30)]
            finish, client_s, spans = await traced_request(cluster, collector, ids, "second")
            check_stages(finish, client_s, spans, 30)
            router, decode, prefill = (spans[name] for name in _SERVICES)
            held = finish.usage.decode_prefix_len
            assert router["decode_prefix_len"] == decode["decode_prefix_len"] == held >= 56
            moved = finish.usage.kv_bytes_moved
            told = [router["kv_bytes_moved"], decode["kv_bytes_moved"], prefill["kv_bytes_moved"]]
            assert told == [moved] * 3 and moved > 0
            assert {"route.wait_prefill_s", "route.compute_s", "route.itl_s"} <= set(router)
