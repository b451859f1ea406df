"""Benchmarks that build ranks of their own still run: what changed in an engine or a service shows here."""

import json
import sys

import pytest

from bench import drain, engine, transfer
from bench.decode_cache import __main__ as decode_cache
from bench.gpu import steps
from bench.gpu.outcomes import headlines
from bench.hybrid import __main__ as hybrid
from bench.placement import real
from bench.placement.generators import WORKLOADS, open_arrivals
from bench.router import __main__ as router

pytestmark = pytest.mark.long


def test_decode_cache_quickly(tmp_path, monkeypatch):
    """In this process, which has its imports and compiled kernels; the prefill ranks are processes."""
    figures = tmp_path / "figures.json"
    arguments = ["--workload=turns", "--quick", "--rounds=1", f"--json={figures}"]
    monkeypatch.setattr(sys, "argv", ["decode_cache", *arguments])
    decode_cache.main()
    written = json.loads(figures.read_text())
    assert {row["cache"] for row in written["rows"]} == {"on", "off"}
    assert all(row["rejected"] == 0 for row in written["rows"])


def test_engine_quickly(tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    sizes = ["--batches=2", "--contexts=64", "--prompts=64", "--rounds=2", "--layers=1", "--hidden=64"]
    monkeypatch.setattr(engine, "SAMPLING_VOCAB_SIZE", 2000)
    monkeypatch.setattr(engine, "SAMPLING_BATCHES", (2,))
    monkeypatch.setattr(sys, "argv", ["engine", *sizes, "--num-threads=1", f"--json={figures}"])
    engine.main()
    rows = json.loads(figures.read_text())["rows"]
    [cost] = [row for row in rows if "cost" in row]
    assert cost["free_ms"] > 0 and cost["constrained_ms"] > 0
    assert {"greedy", "greedy, constrained"} <= {row["sampling"] for row in rows if "sampling" in row}


def test_gpu_steps_quickly(tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    sizes = ["--batches=2", "--context=64", "--prompts=64", "--rounds=2", "--page-size=16", "--num-threads=1"]
    chosen = ["--ways=eager", "--cells", "build", "decode", "continuous", "prompts"]
    monkeypatch.setattr(sys, "argv", ["steps", *sizes, *chosen, f"--json={figures}"])
    with pytest.raises(SystemExit) as ended:
        steps.main()
    written = json.loads(figures.read_text())
    assert ended.value.code == 0, written["outcomes"]
    same = {row["side"]: row["same"] for row in written["tables"]["decode"] if row["same"] != ""}
    assert {"eager", "transformers static", "loop flash"} <= {name for name in same if same[name] == 1}
    assert {row["beside"] for row in written["tables"]["decode"]} == {"eager", "nothing"}
    assert all(row["same"] for row in written["tables"]["prompts"])
    assert any(row["x loop"] for row in headlines({"bench.gpu.steps": written}))


def test_drain_quickly(tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    flags = ["--quick", "--conversations=3", "--length=300", "--transport=local", f"--json={figures}"]
    monkeypatch.setattr(sys, "argv", ["drain", *flags])
    drain.main()
    everything, _, nothing = json.loads(figures.read_text())["rows"]
    assert everything["computed_on"] <= 0.05 < 0.95 < everything["computed_off"]
    assert nothing["others_hit_on"] >= 0.98


def test_hybrid_quickly(tmp_path, monkeypatch):
    """Engine fake; torch takes minutes to start its ranks where other tests run beside."""
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["hybrid", "--quick", f"--json={figures}"])
    hybrid.main()
    written = json.loads(figures.read_text())
    assert {row["rule"] for row in written["sides"]} == {"per group", "least of all groups"}
    assert all(row["rejected"] == row["wrong_bytes"] == 0 for row in written["sides"])
    assert {row["workload"] for row in written["sides"]} == {"conversations", "documents"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["rank", "stand_in"])
def test_router_saturated_quickly(tmp_path, monkeypatch, ranks):
    """With ranks of its own and clients in a process."""
    figures = tmp_path / "figures.json"
    load = [
        "--fronts",
        "grpc",
        "--streams",
        "2",
        "--prompts",
        "100",
        "--answers",
        "1",
        "8",
        "--seconds",
        "0.5",
    ]
    shape = ["--decode-ranks", "2", "--ranks", ranks, "--routers", "2"]
    monkeypatch.setattr(sys, "argv", ["router", "--only", "saturated", f"--json={figures}", *shape, *load])
    router.main()
    rows = json.loads(figures.read_text())["rows"]
    asked = [row for row in rows if row["part"] == "saturated"]
    assert {(row["front"], row["streams"]) for row in asked} == {("grpc", 2), ("decode", 1)}
    assert all(row["errors"] == 0 and row["requests"] > 0 for row in asked)
    assert all(row["tokens/s"] == pytest.approx(row["req/s"] * row["answer"]) for row in asked)
    assert all((row["ITL p99"] > 0) == (row["answer"] > 1) for row in asked if row["front"] == "grpc")
    assert all(row["ITL p99"] <= row["gap p99"] for row in asked)


def test_transfer_quickly(tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(transfer, "PAGE_BYTES", (256 * transfer.KIB,))
    arguments = ["--total-mib=4", "--pool-mib=12", "--rounds=1", f"--json={figures}"]
    monkeypatch.setattr(sys, "argv", ["transfer", *arguments])
    transfer.main()
    rows = json.loads(figures.read_text())["rows"]
    assert [row["pool"] for row in rows] == list(transfer.KINDS)
    fresh, aged, scattered = (row["descriptors"] for row in rows)
    assert fresh == 1 <= aged <= scattered <= 16


async def test_placement_on_real_ranks_quickly(tmp_path):
    """A session's turns find on processes what the simulation predicts."""
    sessions = WORKLOADS["mixed"](4, 1)
    for turn in sessions[0].turns:
        turn.wait_s = 0.2
    requests = [real.scaled(request) for request in open_arrivals(sessions[:1], 10.0, 1)]
    replay = await real.measure(tmp_path, 0, 1, requests)
    row = real.compare(replay, real.predict(0, 1, requests))
    assert set(replay.ttft_s) == set(range(4)) and min(replay.ttft_s.values()) > 0
    assert row["measured_hits"] == pytest.approx(row["predicted_hits"], abs=0.05)
    assert row["measured_hits"] > 0.1
