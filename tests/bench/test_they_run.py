"""Benchmarks that build ranks of their own still run: what changed in an engine or a service shows here."""

import json
import subprocess
import sys


def test_decode_cache_quickly(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.decode_cache", "--workload=turns", "--quick", "--rounds=1"]
    run = subprocess.run([*command, f"--json={figures}"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    written = json.loads(figures.read_text())
    assert {row["cache"] for row in written["rows"]} == {"on", "off"}
    assert all(row["rejected"] == 0 for row in written["rows"])
