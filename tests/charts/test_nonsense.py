"""Nonsense in values is refused with a message that names the value: by the schema, or by a sentence.

What is wrong with a flag by itself the services refuse too (tests/settings/test_nonsense.py, the same table).
"""

import re

import helm_python
import pytest

from charts.rendering import LEAST, merged, render
from settings.nonsense import EVERY_SERVICE, RANK, ROUTER

GPU = {"engine": "sglang", "gpus": 8, "dpSize": 8}
SGLANG = {"prefill": GPU, "decode": GPU}


def nested(path, value):
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def flags():
    for owner, cases in (("decode.flags", RANK), ("router.flags", ROUTER), ("flags", EVERY_SERVICE)):
        for flag, value, _ in cases:
            where = "prefill.flags" if flag == "prefill-cache" else owner
            if flag == "engine-arg":
                yield pytest.param(
                    merged(SGLANG, nested(f"{where}.{flag}", value)), f"/decode/flags/{flag}", id=flag
                )
            else:
                yield pytest.param(
                    nested(where, {flag: value}), f"{where}.{flag}".replace(".", "/"), id=f"{flag}={value}"
                )


VALUES = [
    ("decode.resources.limits", {"memory": "8Gigs"}, "8Gigs"),
    ("decode.resources.limits", {"memory": "much"}, "much"),
    ("decode.resources.limits", {"memory": "-8Gi"}, "-8Gi"),
    ("decode.resources.limits", {"memory": "8gi"}, "8gi"),
    ("decode.resources.limits", {"memory": -1}, "/decode/resources/limits/memory"),
    ("decode.resources.requests", {"cpu": "two"}, "two"),
    ("decode.resources.requests", {"cpu": "2Gi"}, "2Gi"),
    ("router.resources.requests", {"cpu": -1}, "/router/resources/requests/cpu"),
    ("decode.resources", {"limit": {"memory": "8Gi"}}, "limit"),
    ("decode.sharedMemory", "8 Gi", "8 Gi"),
    ("decode.gpus", -1, "/decode/gpus"),
    ("decode.gpuResource", "nvidia.com/", "nvidia.com/"),
    ("decode.rdma.count", 0, "/decode/rdma/count"),
    ("decode.rdma.resource", "rdma hca", "rdma hca"),
    ("decode.replicas", -1, "/decode/replicas"),
    ("decode.replicas", "three", "/decode/replicas"),
    ("decode.startupSeconds", 0, "/decode/startupSeconds"),
    ("decode.hostNetwork", "yes", "/decode/hostNetwork"),
    ("decode.securityContext.capabilities.add", "IPC_LOCK", "/decode/securityContext/capabilities/add"),
    ("decode.podSecurityContext.runAsUser", -1, "/decode/podSecurityContext/runAsUser"),
    ("decode.resourceClaims", [{"name": "gpu"}], "/decode/resourceClaims/0"),
    ("decode.runtimeClassName", "Nvidia Container", "Nvidia Container"),
    ("decode.image.digest", "sha256:abc", "sha256:abc"),
    ("decode.image.tag", "a b", "a b"),
    ("image.repository", "Registry.example/Isthmus", "Registry.example/Isthmus"),
    ("image.digests.cuda", "latest", "latest"),
    ("decode.updateStrategy.type", "Recreate", "/decode/updateStrategy/type"),
    ("decode.updateStrategy.rollingUpdate.maxUnavailable", "half", "half"),
    ("router.updateStrategy.rollingUpdate.maxSurge", -1, "/router/updateStrategy/rollingUpdate/maxSurge"),
    ("decode.podDisruptionBudget.maxUnavailable", "101%", "101%"),
    ("decode.extraEnv", [{"value": "x"}], "/decode/extraEnv/0"),
    ("decode.extraEnv", [{"name": "UCX_TLS", "value": 1}], "/decode/extraEnv/0/value"),
    ("decode.extraVolumes", [{"emptyDir": {}}], "/decode/extraVolumes/0"),
    ("decode.extraVolumeMounts", [{"name": "v", "mountPath": "v"}], "/decode/extraVolumeMounts/0/mountPath"),
    ("decode.tolerations", [{"operator": "Exist"}], "/decode/tolerations/0/operator"),
    ("decode.nodeSelector", {"gpu": "an H200"}, "an H200"),
    ("decode.topologySpreadConstraints", [{"topologyKey": "zone"}], "/decode/topologySpreadConstraints/0"),
    ("router.autoscaling.targetCPUUtilizationPercentage", 0, "targetCPUUtilizationPercentage"),
    ("router.preStopSeconds", -1, "/router/preStopSeconds"),
    ("router.service.type", "Public", "/router/service/type"),
    ("etcd.image.digest", "v3.6.6", "v3.6.6"),
    ("etcd.persistence.size", "8Gigs", "8Gigs"),
    ("etcd.autoCompactionRetention", "ten minutes", "ten minutes"),
    ("etcd.external.endpoints", ["etcd:0"], "etcd:0"),
    ("tls.serverName", "is thmus", "is thmus"),
    ("tracing.endpoint", "http://collector:0", "http://collector:0"),
    ("ingress.host", "https://llm.example.com", "https://llm.example.com"),
    ("gateway.hostnames", ["llm example"], "llm example"),
    ("gateway.parentRefs", [{}], "/gateway/parentRefs/0"),
    ("networkPolicy.clients", [{"podSelektor": {}}], "podSelektor"),
    ("monitoring.scrapeInterval", "often", "often"),
    ("test.timeoutSeconds", 0, "/test/timeoutSeconds"),
]  # fmt: skip

TOGETHER = {
    "local prompts with SGLang": (
        merged(SGLANG, {"router": {"flags": {"plans": ["remote", "local"]}}}),
        "router.flags.plans has local, and engine sglang's decode computes no prompts",
    ),
    "SGLang's page size beside ours": (
        merged(SGLANG, {"decode": {"flags": {"engine-arg": ["--page-size=16"]}}}),
        "decode.flags.engine-arg --page-size=16: the service sets it itself",
    ),
    "another tier of SGLang's cache": (
        merged(SGLANG, {"prefill": {"flags": {"engine-arg": ["--hicache-storage-backend=file"]}}}),
        "prefill.flags.engine-arg --hicache-storage-backend=file: the index knows one tier",
    ),
    "a tier below decode's pool": (
        merged(SGLANG, {"decode": {"flags": {"engine-arg": ["--hicache-ratio=2"]}}}),
        "decode.flags.engine-arg --hicache-ratio=2: only prefill can have it",
    ),
    "layers of SGLang's shared out": (
        merged(SGLANG, {"decode": {"flags": {"engine-arg": ["--pp-size=2"]}}}),
        "decode.flags.engine-arg --pp-size=2: every process of a rank",
    ),
    "GPUs asked for by nobody": (
        {"decode": {"gpus": 1, "gpuResource": ""}},
        "decode.gpus is 1, and neither gpuResource nor resourceClaims says",
    ),
    "policies for the node's network": (
        {"decode": {"hostNetwork": True}},
        "decode.hostNetwork and networkPolicy.enabled exclude each other",
    ),
    "an autoscaler that aims at more than a router can use": (
        {"router": {"resources": {"requests": {"cpu": "2"}}}},
        "router.resources.requests.cpu is 2 and router.autoscaling.targetCPUUtilizationPercentage 70: "
        "each router would have to use 1.54 cores",
    ),
    "an autoscaler without a measure": (
        {"router": {"resources": {"requests": {"cpu": None}}}},
        "router.autoscaling.enabled needs router.resources.requests.cpu",
    ),
}


@pytest.mark.parametrize(("values", "named"), list(flags()))
def test_a_flag_that_no_service_takes_is_refused(values, named):
    with pytest.raises(helm_python.HelmValuesError, match=re.escape(named)):
        render(merged(LEAST, values))


@pytest.mark.parametrize(("path", "value", "named"), VALUES, ids=lambda part: str(part))
def test_a_value_that_is_none_is_refused(path, value, named):
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render(merged(LEAST, nested(path, value)))
    assert named in str(refusal.value)
    assert "/" + path.replace(".", "/") in str(refusal.value)


@pytest.mark.parametrize("case", TOGETHER)
def test_values_that_do_not_go_together_are_refused(case):
    values, sentence = TOGETHER[case]
    with pytest.raises(helm_python.HelmRenderError, match=re.escape(sentence)):
        render(merged(LEAST, values))


def test_what_is_no_nonsense_is_taken():
    """The same values, right: else the table could pass for a reason of its own."""
    worker = {
        "resources": {"requests": {"cpu": 0.5, "memory": "8Gi"}, "limits": {"memory": 8589934592}},
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "updateStrategy": {"rollingUpdate": {"maxUnavailable": "25%", "partition": 1}},
        "extraEnv": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "tolerations": [{"operator": "Exists"}],
        "flags": {"kv-pages": 1, "dtype": "float16", "fence-margin-s": 0, "grace-s": 0},
    }
    render(merged(LEAST, {"prefill": worker | {"flags": {"dtype": "float16"}}, "decode": worker}))
    arguments = ["--tp-size=8", "--pp-size=1", "--enable-dp-attention"]
    render(merged(LEAST, SGLANG, {"decode": {"flags": {"engine-arg": arguments}}}))
