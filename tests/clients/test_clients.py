"""Unmodified packages of clients, each in its own environment, against `isthmus up` (make test-clients).

The model has random weights: whatever has to be a call or an object is made one by its grammar.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clients.clusters import ENVIRONMENTS, ROOT, running
from services.cli.model.make_model import make_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
SERVED = "tools"
# By script: the environment whose package it tries.
PYTHON = {
    "try_openai": "sdks",
    "try_anthropic": "sdks",
    "try_openai_agents": "sdks",
    "try_instructor": "instructor",
    "try_langchain": "frameworks",
    "try_pydantic_ai": "frameworks",
    "try_litellm": "litellm",
    "try_llama_index": "llama-index",
    "try_lm_eval": "lm-eval",
    "try_guidellm": "guidellm",
    "try_aiperf": "aiperf",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Where it answers over HTTP, and its checkpoint."""
    folder = tmp_path_factory.mktemp("clients")
    model = folder / SERVED
    make_model(model, "llama", tokenizer="bytes", chat_template="tools")
    with running(model, folder) as url:
        yield url, model


def try_it(command, cluster):
    url, model = cluster
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(SCRIPTS),
    }
    environment |= {"ISTHMUS_URL": url, "ISTHMUS_MODEL": SERVED, "ISTHMUS_MODEL_DIRECTORY": str(model)}
    environment |= {"ISTHMUS_NODE": str(ENVIRONMENTS / "node")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    print(said)
    assert done.returncode == 0 and "ok " in done.stdout, said


@pytest.mark.parametrize("script", PYTHON)
def test_a_package_for_python(script, cluster):
    try_it([ENVIRONMENTS / PYTHON[script] / "bin" / "python", SCRIPTS / f"{script}.py"], cluster)


def test_openai_for_npm(cluster):
    if not (ENVIRONMENTS / "node" / "node_modules" / "openai").exists():
        pytest.skip("npm was missing when the environments were made (apt install nodejs npm)")
    try_it(["node", SCRIPTS / "try_openai.mjs"], cluster)


def test_what_codex_sends(cluster):
    """Requests in the shapes that Codex' CLI was recorded with, and what it reads of the answers."""
    try_it([sys.executable, SCRIPTS / "try_codex.py"], cluster)


def test_sglangs_bench_serving(cluster, tmp_path):
    """With the stand-in for torchvision that SGLang runs with on a CPU here."""
    if not SGLANG.exists() or not (ENVIRONMENTS / "bench-serving").exists():
        pytest.skip("there was no .venv-sglang when the environments were made (make setup-sglang)")
    url, model = cluster
    lengths = ["--random-input-len=64", "--random-output-len=16", "--num-prompts=4", "--random-range-ratio=1"]
    command = [SGLANG, "-m", "sglang.bench_serving", "--backend=sglang", f"--base-url={url}"]
    command += [
        f"--model={model}",
        "--dataset-name=random-ids",
        *lengths,
        f"--output-file={tmp_path / 'out'}",
    ]
    path = f"{ROOT / 'services/engine/sglang/cpu_stand_ins'}:{ENVIRONMENTS / 'bench-serving'}"
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Successful requests: +4\b", done.stdout), done.stdout
