"""Benchmarks that build ranks of their own still run: what changed in an engine or a service shows here."""

import json
import sys

from bench import decode_cache


def test_decode_cache_quickly(tmp_path, monkeypatch):
    """In this process, which has its imports and compiled kernels; the prefill ranks are processes."""
    figures = tmp_path / "figures.json"
    arguments = ["--workload=turns", "--quick", "--rounds=1", f"--json={figures}"]
    monkeypatch.setattr(sys, "argv", ["decode_cache", *arguments])
    decode_cache.main()
    written = json.loads(figures.read_text())
    assert {row["cache"] for row in written["rows"]} == {"on", "off"}
    assert all(row["rejected"] == 0 for row in written["rows"])
