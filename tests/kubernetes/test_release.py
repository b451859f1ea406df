"""The chart on the Kubernetes that KUBECONFIG names, as `make kube-test IMAGE=REPOSITORY:TAG` runs it.

A namespace is made, and in it a release with two pods of each kind. While a pod converses with it,
pods are deleted, and it is upgraded. Nothing else of the cluster is touched.
"""

import json
import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "isthmus"
IMAGE = os.environ.get("KUBE_IMAGE", "")
READY = "--timeout=600s"  # a deadline, never waited out
TWO = "decode.replicas=2,decode.dpSize=1,prefill.replicas=2,router.replicas=2"

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (IMAGE and os.environ.get("KUBECONFIG")), reason="no KUBECONFIG and KUBE_IMAGE"),
]


class Release:
    def __init__(self):
        self.namespace = f"isthmus-test-{uuid.uuid4().hex[:8]}"
        repository, _, tag = IMAGE.rpartition(":")
        self.values = ["--values", CHART / "samples" / "laptop.yaml", "--set", TWO]
        self.values += ["--set", f"image.repository={repository},image.tag={tag}"]

    def kubectl(self, *arguments, given=None):
        return self._run("kubectl", *arguments, given=given)

    def helm(self, *arguments):
        return self._run(os.environ.get("HELM", "helm"), *arguments)

    def _run(self, *command, given=None):
        program, *arguments = map(str, command)
        command = [program, f"--namespace={self.namespace}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, input=given)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def until_ready(self):
        for workload in (
            "statefulset/isthmus-prefill",
            "statefulset/isthmus-decode",
            "deploy/isthmus-router",
        ):
            self.kubectl("rollout", "status", workload, READY)

    def names(self, kind, *options):
        return self.kubectl("get", kind, "--output=name", *options).split()

    def one_router(self):
        return self.names("pod", "--selector=app.kubernetes.io/component=router")[0]


@pytest.fixture(scope="module")
def release():
    release = Release()
    release.kubectl("create", "namespace", release.namespace)
    # What the strictest of Kubernetes' own standards refuses, an administrator may refuse.
    strict = "pod-security.kubernetes.io/enforce=restricted"
    release.kubectl("label", "namespace", release.namespace, strict)
    try:
        release.helm("install", "isthmus", CHART, *release.values)
        release.until_ready()
        yield release
    finally:
        release.kubectl("delete", "namespace", release.namespace, "--wait=false")


@pytest.fixture
def conversing(release):
    """A pod that converses; what it noticed is looked at in the end."""
    script = (Path(__file__).parent / "converse.py").read_text()
    container = {
        "name": "converse",
        "image": IMAGE,
        "command": ["python", "-c", script, f"isthmus-router.{release.namespace}.svc"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "securityContext": security, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "converse"}, "spec": spec}
    release.kubectl("create", "--filename=-", given=json.dumps(pod))
    try:
        release.kubectl("wait", "--for=condition=Ready", "pod/converse", READY)
        in_pod = ("exec", "converse", "--", "sh", "-c")
        release.kubectl(*in_pod, "until [ -e /tmp/first ]; do sleep 0.2; done")
        yield
        time.sleep(5)  # so that what came back is used, too
        release.kubectl(*in_pod, "touch /tmp/stop")
        release.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/converse", READY)
        said = json.loads(release.kubectl("logs", "converse").splitlines()[-1])
        assert said["noticed"] == [] and said["answers"] > 20, said
    finally:
        release.kubectl("delete", "pod", "converse", "--ignore-not-found", "--grace-period=1")


def test_a_second_turn_finds_the_first_one_s_kv(release):
    for _ in range(2):  # it may be asked again
        said = release.helm("test", "isthmus", "--logs")
        assert "the second turn found the first one's KV" in said


def test_a_pod_keeps_its_name_and_nothing_can_be_written_but_tmp(release):
    script = "id -u; hostname; touch /tmp/x && ! touch /x && ! touch /opt/isthmus/x"
    said = release.kubectl("exec", "isthmus-decode-1", "--", "sh", "-c", script)
    assert said.split() == ["10001", "isthmus-decode-1"]


def test_nobody_notices_a_pod_that_is_deleted(release, conversing):
    for pod in ("pod/isthmus-decode-0", "pod/isthmus-prefill-0", release.one_router()):
        release.kubectl("delete", pod)
        release.until_ready()


def test_nobody_notices_a_node_that_is_gone(release, conversing):
    release.kubectl("delete", "pod/isthmus-decode-1", "--force", "--grace-period=0")
    release.until_ready()


def test_nobody_notices_an_upgrade(release, conversing):
    release.helm("upgrade", "isthmus", CHART, *release.values, "--set", "flags.log-level=debug")
    release.until_ready()


def test_a_pod_is_gone_soon_where_nothing_runs(release):
    begun = time.monotonic()
    release.kubectl("delete", "pod/isthmus-decode-1")
    assert time.monotonic() - begun < 40  # of a grace of 65 seconds
    release.until_ready()


def test_a_pod_that_is_deleted_as_it_is_made_is_gone_soon(release):
    """Its container is started all the same, and told to stop before Python can have begun."""
    release.kubectl("delete", "pod/isthmus-decode-1")
    release.kubectl("wait", "--for=create", "pod/isthmus-decode-1", READY)
    begun = time.monotonic()
    release.kubectl("delete", "pod/isthmus-decode-1")
    assert time.monotonic() - begun < 40  # of a grace of 65 seconds
    release.until_ready()


def test_an_uninstalled_release_leaves_its_test_s_pod_alone(release):
    """Helm keeps what a hook has made, for its log."""
    release.helm("uninstall", "isthmus")
    release.kubectl("wait", "--for=delete", "pod", "--selector=app.kubernetes.io/component!=test", READY)
    kinds = release.kubectl("api-resources", "--namespaced", "--verbs=list,delete", "--output=name").split()
    kinds = [kind for kind in kinds if not kind.startswith("events")]
    left = release.names(
        ",".join(kinds), "--selector=app.kubernetes.io/instance=isthmus", "--ignore-not-found"
    )
    assert left == ["pod/isthmus-test"]
