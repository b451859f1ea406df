"""These tests show what is counted, against the definitions of sglang.bench_serving written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scripted_router import Pauses
from services.cli.bench.meter import Meter, figures_of, lines_of
from services.cli.bench.sides import Arrival, Counts
from services.values.errors import NoCapacity

pytestmark = pytest.mark.long

# Of each request: pauses, and how many tokens come after each; then how long until its end.
requests = st.lists(
    st.tuples(
        st.lists(st.tuples(st.floats(0, 2), st.integers(1, 4)), min_size=1, max_size=6), st.floats(0, 1)
    ),
    min_size=1,
    max_size=6,
)


def run(requests, meter, time):
    """One after another."""
    for pieces, rest_s in requests:
        running = meter.begin()
        for pause_s, num_tokens in pieces:
            time.sleep(pause_s)
            meter.note(running, Arrival(num_tokens))
        time.sleep(rest_s)
        meter.note(running, Arrival())
        meter.end(running, Counts(10, sum(count for _, count in pieces), 4, 3, 7, 100, 50))


@given(requests)
def test_latencies_are_as_defined(requests):
    time = Pauses()
    meter = Meter(time.clock)
    run(requests, meter, time)
    ttfts = [pieces[0][0] for pieces, _ in requests]
    e2es = [sum(pause for pause, _ in pieces) + rest for pieces, rest in requests]
    counts = [sum(count for _, count in pieces) for pieces, _ in requests]
    tpots = [
        (e2e - ttft) / (count - 1) for ttft, e2e, count in zip(ttfts, e2es, counts, strict=True) if count > 1
    ]
    itls = [pause / count for pieces, _ in requests for pause, count in pieces[1:] for _ in range(count)]
    figures = figures_of(meter)
    for name, values in {"ttft": ttfts, "e2e_latency": e2es, "tpot": tpots, "itl": itls}.items():
        assert figures[f"mean_{name}_ms"] == pytest.approx(1e3 * np.mean(values or 0), abs=1e-6)
        assert figures[f"p99_{name}_ms"] == pytest.approx(1e3 * np.percentile(values or 0, 99), abs=1e-6)
    assert figures["total_output_tokens"] == sum(counts) == sum(meter.tokens_by_second.values())
    assert figures["duration"] == pytest.approx(max(sum(e2es), 1e-9))
    assert figures["cache_hit_rate"] == 0.4 and figures["decode_hit_rate"] == 0.3
    assert figures["kv_bytes_moved"] == 100 * len(requests)


def a_bad_run():
    time = Pauses()
    meter = Meter(time.clock)
    run([([(0.5, 1), (0.25, 2)], 0.0)], meter, time)
    cut, failed = meter.begin(), meter.begin()
    assert meter.running == meter.most_running == 2
    meter.note(cut, Arrival(5))
    meter.note(failed, Arrival(5))
    meter.cut()
    meter.stopped = True
    meter.fail(NoCapacity("the cluster is full: the request would wait 9.0 s for its turn"))
    return meter


def test_a_run_in_which_not_all_ended_well(subtests):
    with subtests.test("what did not end is in no latency"):
        meter = a_bad_run()
        figures = figures_of(meter)
        assert (figures["completed"], figures["cut"], figures["errors"]) == (1, 1, {"NoCapacity": 1})
        assert meter.ttft.count == meter.e2e.count == 1 and meter.itl.count == 2 and meter.running == 0
        assert figures["total_output_tokens"] == 3
    with subtests.test("what a person reads"):
        lines = "\n".join(lines_of(a_bad_run(), 80)).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines == [
            "1 requests in 0.8 s: 1.33 requests/s, 13 input and 4 output tokens/s; 1.0 at",
            "once on average, 2 at most",
            "",
            "milliseconds  mean    p50     p90     p99",
            "------------  ------  ------  ------  ------",
            "TTFT          500.00  500.00  500.00  500.00",
            "ITL           125.00  125.00  125.00  125.00",
            "TPOT          125.00  125.00  125.00  125.00",
            "E2E           750.00  750.00  750.00  750.00",
            "",
            "10 prompt tokens: 40.0% reused by who computed them, 30.0% held by decode; 7",
            "crossed, KV moved 100 B, saved 50 B",
            "failed: 1 with NoCapacity: the cluster is full: the request would wait 9.0 s for",
            "its turn",
            "stopped, with 1 still running: they are in none of the figures",
        ]
