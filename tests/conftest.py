"""Settings of all tests, and the fixtures that several folders share."""

import asyncio
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from etcd.real_etcd import FAST
from services.etcd.embedded import EmbeddedEtcd
from services.observe import traces

pytest_plugins = ["plugins.longest", "plugins.mutations", "plugins.transcripts", "pytester"]

# Before anyone imports torch. Its threads wait for each other by spinning: with two of them in each of
# several processes on two cores, a model as small as ours takes ten times the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No verdict by the clock: on a busy machine a slow example is not a wrong one. CI tries the same examples
# each time, so that a red run is the change's doing; at a desk every run tries others.
settings.register_profile(
    "isthmus",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("isthmus")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imported modules stay: each collection that looks through them would take a third of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def checkpoints_folder(tmp_path_factory):
    """All workers of a run share one; checkpoints.py finds it by a variable, as few tests import torch."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    os.environ["ISTHMUS_TEST_CHECKPOINTS"] = str(folder / "checkpoints")


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory):
    """One etcd for all tests of a process; each is a cluster of its own in it."""
    with asyncio.Runner() as runner:
        server = EmbeddedEtcd(tmp_path_factory.mktemp("etcd"), extra_arguments=FAST)
        runner.run(server.start())
        yield server.endpoint
        runner.run(server.stop())


@pytest.fixture
def spans(monkeypatch):
    """An exporter that keeps the spans of all services in this process.

    OpenTelemetry takes one global provider for good, so ours goes in where the services ask for a tracer.
    """
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "tracer", lambda: provider.get_tracer("isthmus"))
    return exporter


@pytest.fixture
def cluster_name(request):
    return "".join(c if c.isalnum() else "-" for c in request.node.name)
