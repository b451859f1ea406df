"""The simulator of bench.placement, on workloads of seconds."""

import json
import subprocess
import sys
from random import Random

import pytest

from bench.placement.goals import goals
from bench.placement.simulation import POLICIES, Simulation
from bench.placement.workload import pooled_lru_hits, read_trace
from services.router.replay.events import Events
from services.router.replay.ours import Pins
from services.router.replay.setting import Setting, Timing
from services.router.replay.workload import TraceRequest
from services.values.rank import RankKey

pytestmark = pytest.mark.long


@pytest.fixture
def trace(tmp_path):
    """40 conversations of up to six turns, each a block longer than the last; one block in common."""
    random, entries, next_block = Random(5), [], 1
    for _ in range(40):
        at_ms, blocks = random.randrange(100_000), [0]
        for _ in range(random.randint(1, 6)):
            blocks = [*blocks, *range(next_block, next_block + 4)]
            next_block += 4
            tokens = 512 * len(blocks) - random.randrange(512)
            entry = {"timestamp": at_ms, "input_length": tokens, "output_length": 50, "hash_ids": blocks}
            entries.append(entry)
            at_ms += random.randrange(2_000, 20_000)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in sorted(entries, key=lambda e: e["timestamp"])))
    return path


# In an aggregated layout nobody would compute what "ours-remote" places.
SERVED = [(0, 3, policy) for policy in POLICIES if policy != "ours-remote"] + [(2, 2, p) for p in POLICIES]


def tokens_after(num_blocks, request) -> int:
    return request.prompt_tokens - min(512 * num_blocks, request.prompt_tokens - 1)


def test_simulations(subtests, trace):
    for prefill, decode, policy in SERVED:
        with subtests.test(
            "every policy serves every request", prefill=prefill, decode=decode, policy=policy
        ):
            requests = read_trace(trace)
            simulation = Simulation(Setting(prefill, decode, blocks=80, routers=2), policy, requests)
            row = simulation.run()  # it checks the books of every rank
            assert {job.request.number for job in simulation.jobs} == set(range(len(requests)))
            prompt_tokens = sum(request.prompt_tokens for request in requests)
            assert (
                row["computed_ratio"] == sum(job.computed_tokens for job in simulation.jobs) / prompt_tokens
            )
            for job in simulation.jobs:
                tokens = job.request.prompt_tokens
                computing = job.prefill or job.decode
                own_blocks = job.resumed_blocks - job.pulled_blocks
                assert own_blocks == job.decode_blocks or job.prefill
                assert job.computed_tokens == tokens - min(512 * job.resumed_blocks, tokens - 1)
                assert (
                    job.first_token_s - job.request.arrival_s
                    >= job.computed_tokens / computing.timing.tokens_per_s
                )
                assert job.ended_s >= job.first_token_s
                pulled_s = 0.0 if job.pulled is None else job.pulled.seconds
                waited = job.decode_queue_s, job.prefill_queue_s, pulled_s, job.transfer_s
                hops_s = (1 if job.prefill is None else 3) * job.decode.timing.hop_s
                told_s = sum(waited) + job.computed_s - job.began_s + hops_s
                # Its times are told as a rank tells them, and no moment is missing.
                assert min(waited) >= 0
                assert job.first_token_s - job.request.arrival_s == pytest.approx(told_s, abs=1e-6)
            assert (row["local_share"] == 0) == (
                prefill > 0 and policy not in ("ours", "ours-alone", "oracle")
            )
    # 16 states a rank; each prompt leaves one, where it ends or parts from another.
    with subtests.test("who asks for the states computes less than who takes what is held for them"):
        requests, computed = read_trace(trace), {}
        # Qwen3.5-35B-A3B: a state is as heavy as 3,174 tokens of its attention.
        timing = Timing(kv_bytes_per_token=20_480, state_bytes=62 << 20)
        for policy in ("ours", "ours-held"):
            setting = Setting(2, 2, blocks=200, states=16, timing=timing)
            simulation = Simulation(setting, policy, requests)
            computed[policy] = simulation.run()["computed_ratio"]
            jobs = simulation.jobs
            assert all(job.computed_tokens == tokens_after(job.resumed_blocks, job.request) for job in jobs)
            assert any(0 < job.resumed_blocks < job.decode_blocks for job in jobs if job.prefill is None)
            remote = [job for job in jobs if job.prefill is not None]
            assert all(
                job.transfer_s >= setting.timing.state_bytes / setting.timing.bytes_per_s for job in remote
            )
        assert computed["ours"] < computed["ours-held"] < 1.0
    with subtests.test("what a tier keeps is brought up and not computed again"):
        requests, computed = read_trace(trace), []
        for tier_blocks in (0, 160):
            setting = Setting(0, 3, blocks=40, tier_blocks=tier_blocks)
            simulation = Simulation(setting, "ours", requests)
            computed.append(simulation.run()["computed_ratio"])
            jobs = simulation.jobs
            assert all(job.computed_tokens == tokens_after(job.resumed_blocks, job.request) for job in jobs)
            for job in jobs:
                assert job.resumed_blocks == job.decode_blocks + job.brought_blocks + job.pulled_blocks
            assert any(job.brought_blocks for job in jobs) == (tier_blocks > 0)
        assert computed[1] < 0.9 * computed[0]
    with subtests.test("a crowd pulls what one rank holds, and computes it nowhere else"):
        prefix, jobs = tuple(range(1, 65)), {}
        arrivals_s = [0.0] + [20 + 0.1 * number for number in range(8)]
        requests = []
        for number, at_s in enumerate(arrivals_s):
            blocks = (*prefix, *range(100 * number + 100, 100 * number + 116))
            requests.append(TraceRequest(number, at_s, blocks, 80 * 512, 50, f"s{number}"))
        for policy in ("ours", "ours-alone"):
            simulation = Simulation(Setting(0, 4), policy, requests)
            simulation.serve()
            jobs[policy] = simulation.jobs
        pulled = [job for job in jobs["ours"] if job.pulled is not None]
        assert pulled and not any(job.source for job in jobs["ours-alone"])
        for job in pulled:
            assert job.pulled.tokens == 512 * job.pulled_blocks == 512 * 64
            assert job.pulled.seconds >= job.pulled.bytes / job.decode.timing.bytes_per_s
            assert job.began_s >= job.queued_s + job.pulled.seconds
        assert sum(job.resumed_blocks == 0 for job in jobs["ours"]) == 1
        waited = {p: sum(job.first_token_s - job.request.arrival_s for job in of) for p, of in jobs.items()}
        assert waited["ours"] < waited["ours-alone"]
    with subtests.test("a run can be repeated"):
        requests = read_trace(trace)
        rows = [Simulation(Setting(2, 2, blocks=80), "ours", requests).run() for _ in range(2)]
        for row in rows:
            del row["cpu_s"]
        assert rows[0] == rows[1]
    with subtests.test("placement by prefix and load computes least"):
        requests = read_trace(trace)
        rows = {
            policy: Simulation(Setting(0, 3), policy, requests).run() for policy in ("ours", "round-robin")
        }
        assert rows["ours"]["computed_ratio"] < 0.8 * rows["round-robin"]["computed_ratio"]
    with subtests.test("copies share the first block only"):
        once, twice = read_trace(trace), read_trace(trace, copies=2)
        assert len(twice) == 2 * len(once)
        blocks = {block for request in twice for block in request.blocks}
        assert len(blocks) == 2 * len({block for request in once for block in request.blocks}) - 1
        assert [request.arrival_s for request in twice] == sorted(request.arrival_s for request in twice)


def test_pools_and_pins(subtests, trace):
    with subtests.test("pins live as long as in etcd and reach others late"):
        events, home, other = Events(), RankKey("d", 0), RankKey("d", 1)
        pins = Pins(events, staleness_s=0.25)
        pins.pin("a", home, 0)
        assert (pins.of("a", 0), pins.of("a", 1), pins.of("b", 0)) == (home, None, None)
        events.now = 0.3
        assert pins.of("a", 1) == home
        events.now = 1.0
        pins.pin("a", other, 1)
        assert (pins.of("a", 0), pins.of("a", 1)) == (home, other)
        events.now = 1_000.0
        assert pins.of("a", 0) == other
        pins.pin("a", other, 0)  # half of its life is over
        events.now = 2_000.0
        assert pins.of("a", 1) == other
        pins.pin("a", other, 1)
        events.now = 3_799.0
        assert pins.of("a", 0) == other
        events.now = 3_800.0
        assert pins.of("a", 0) is None
    with subtests.test("an endless pool hits what was ever seen"):
        requests, seen, hits = read_trace(trace), set(), 0
        for request in requests:
            hits += sum(block in seen for block in request.blocks)
            seen |= set(request.blocks)
        expected = hits / sum(len(request.blocks) for request in requests)
        assert pooled_lru_hits(requests, 10**9) == pytest.approx(expected)
        assert pooled_lru_hits(requests, 1) < expected


def test_rows_of_all_layouts_are_written(trace, tmp_path):
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "bench.placement",
        f"--trace={trace}",
        f"--json={figures}",
        "--layouts=8,4+4",
    ]
    command += ["--policies=ours,oracle,sticky", "--duration-s=20"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    written = json.loads(figures.read_text())
    layouts = {"8 aggregated", "4+4"}
    told = sorted((row["layout"], row["policy"]) for row in written["rows"])
    assert told == sorted((layout, p) for layout in layouts for p in ("ours", "oracle", "sticky"))
    assert {goal["at"] for goal in written["settings"]["goals"]} == layouts


def row(policy: str, layout: str = "8 aggregated", **figures: object) -> dict[str, object]:
    setting = {"layout": layout, "policy": policy}
    usual = {
        "prefill_hit": 0.0,
        "decode_hit": 0.27,
        "computed_ratio": 0.7,
        "cpu_s": 10.0,
        "simulated_s": 1_800.0,
    }
    return setting | usual | {"ttft_mean_s": 2.0, "ttft_p50_s": 0.6, "ttft_p99_s": 8.0} | figures


def judged(*rows: dict[str, object]) -> dict[object, object]:
    """By goal. A pool of so many ranks hits .03 a rank."""
    return {row["goal"]: row["met"] for row in goals(rows, lambda row, num_ranks: 0.03 * num_ranks)}


def test_goals(subtests):
    with subtests.test("goals are judged by the rows that are there"):
        assert judged(row("cache-aware"), row("oracle")) == {}
        ours = row("ours", ttft_mean_s=1.0, ttft_p50_s=0.5, ttft_p99_s=9.0)
        alone = {
            "decode hits / pooled LRU": True,
            "hits, aggregated": True,
            "CPU s to simulate an hour": True,
        }
        assert judged(ours) == alone
        assert judged(ours, row("cache-aware"), row("sticky", ttft_p50_s=0.4)) == alone | {
            "TTFT mean / cache-aware's": True,
            "TTFT p50 / sticky's, the lowest": False,
            "TTFT p99 / cache-aware's, the lowest": False,
        }
    with subtests.test("each role is judged by its hits"):
        ours = row("ours", "2+6", prefill_hit=0.05, decode_hit=0.17)
        oracle = row("oracle", "2+6", prefill_hit=0.06, decode_hit=0.17)
        assert judged(ours, row("ours-remote", "2+6", prefill_hit=0.06), oracle) == {
            "decode hits / pooled LRU": True,
            "prefill hits / pooled LRU": False,
            "prefill hits / pooled LRU, remote only": True,
            "compute saved, above prefill's caches": True,
            "decode hits / oracle's": True,
            "prefill hits / oracle's": False,
            "tokens saved / oracle's": True,
            "CPU s to simulate an hour": True,
            "TTFT p50 / ours-remote's, the lowest": True,
            "TTFT p99 / ours-remote's, the lowest": True,
        }
    # Of half an hour.
    for layout, goal, most_cpu_s in [
        ("8 aggregated", "CPU s to simulate an hour", 30.0),
        ("200+800", "CPU s to simulate a second", 1_800.0),
        ("8+64", None, 0.0),
    ]:
        with subtests.test(
            "simulating is judged by the cpu time it takes", layout=layout, goal=goal, most_cpu_s=most_cpu_s
        ):
            for cpu_s, met in ((0.99 * most_cpu_s, True), (1.01 * most_cpu_s, False)):
                speeds = {
                    name: met
                    for name, met in judged(row("ours", layout, cpu_s=cpu_s)).items()
                    if "CPU" in name
                }
                assert speeds == ({goal: met} if goal else {})
