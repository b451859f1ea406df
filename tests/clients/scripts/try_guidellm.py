"""guidellm: a small load of chats and of completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, DIRECTORY, MODEL, run

COMMAND = Path(sys.executable).with_name("guidellm")


def loaded(path):
    """With requests to that path."""
    report = Path(tempfile.mkdtemp()) / "report.json"
    how = {
        "backend": f"kind=openai_http,target={BASE},model={MODEL},request_format={path}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=8",
        "tokenizer": f"kind=huggingface_auto,model={DIRECTORY}",
        "data": "kind=synthetic_text,prompt_tokens=40,output_tokens=16",
        "output": f"kind=json,path={report}",
    }
    command = [COMMAND, "run", "--disable-progress", *(f"--{name}={value}" for name, value in how.items())]
    subprocess.run(command, check=True, timeout=200)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals


def chats():
    loaded("/v1/chat/completions")


def completions():
    loaded("/v1/completions")


run(chats, completions)
