"""The examples of docs/python.md and of README.md run, as they stand there, against a cluster."""

import asyncio
import re
from pathlib import Path

import pytest

from cluster.harness import FakeCluster
from services.cli.model.make_model import make_model
from services.engine import fake

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs" / "python.md", ROOT / "README.md"]
TARGET = "127.0.0.1:7777"
_FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

VOCAB_SIZE = 261  # of the tokenizer: answers go back as ids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs") / "model"
    make_model(directory, tokenizer="bytes", chat_template="tools")
    return directory


async def test_every_example_runs(etcd_endpoint, cluster_name, model, monkeypatch):
    monkeypatch.setitem(fake.FakeRunner.__init__.__kwdefaults__, "vocab_size", VOCAB_SIZE)
    examples = [example for document in DOCUMENTS for example in _FENCED.findall(document.read_text())]
    assert len(examples) >= 8 and all(TARGET in example for example in examples)
    async with FakeCluster(etcd_endpoint, model, cluster_name, decode=(1,), model=str(model)) as cluster:
        target = f"127.0.0.1:{cluster.routers[0].server.port}"
        for example in examples:
            code = compile(example.replace(TARGET, target), "example", "exec")
            await asyncio.to_thread(exec, code, {"__name__": "example"})
        await cluster.assert_nothing_held()
