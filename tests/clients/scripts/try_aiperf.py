"""NVIDIA's aiperf: a small load of chats and of completions, and the router's metrics beside it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, DIRECTORY, MODEL, run

COMMAND = Path(sys.executable).with_name("aiperf")


def profiled(endpoint):
    folder = Path(tempfile.mkdtemp())
    load = ["--request-count=8", "--concurrency=2", "--synthetic-input-tokens-mean=40"]
    # A random model may end at once, or say half a character: an answer without text is an error there.
    load += ["--output-tokens-mean=32", "--extra-inputs=ignore_eos:true", "--random-seed=1"]
    shown = [f"--artifact-dir={folder}", "--ui-type=none"]
    of_model = [f"--model={MODEL}", f"--tokenizer={DIRECTORY}", f"--url={BASE}"]
    command = [COMMAND, "profile", *of_model, f"--endpoint-type={endpoint}", "--streaming", *load, *shown]
    subprocess.run(command, check=True, timeout=200)
    profile = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert profile["request_count"]["avg"] == 8 and not profile["error_summary"], profile["error_summary"]
    assert profile["time_to_first_token"]["count"] == 8
    return json.loads((folder / "server_metrics_export.json").read_text())


def chats():
    scraped = profiled("chat")["summary"]
    assert scraped["endpoints_successful"] == [f"{BASE}/metrics"], scraped


def completions():
    profiled("completions")


run(chats, completions)
