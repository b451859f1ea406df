"""Nonsense is refused before anything is installed, with a sentence that names the value."""

import json

import helm_python
import pytest

from charts.rendering import CHART, LEAST, merged, render
from charts.test_replicas import PLANNED
from services.rank.rank_config import _NOT_SGLANG, RankConfig
from services.router.router_config import RouterConfig
from services.settings.cluster_config import ClusterConfig
from services.settings.flags import describe

GPU = {"engine": "sglang", "gpus": 8, "dpSize": 8}
NOT_SGLANG = tuple(name.replace("_", "-") for name in _NOT_SGLANG if name != "kv_tier")


def of_role(role):
    """The flags whose help says that they are that role's alone."""
    return [flag.name for flag in describe(RankConfig) if flag.help.endswith(f"({role})")]


DRAFTING = ("speculation", "draft-tokens", "speculate-unsalted")
VALUES = {
    "expect-kv-path": "rdma",
    "speculation": "lookup",
    "draft-tokens": 3,
    "speculate-unsalted": True,
    "draft-model": "/model/draft",
    "kv-dtype": "fp8_e4m3",
    "pull": "off",
    "move-running": True,
}


def a_value(flag):
    return "off" if flag.endswith("-cache") else VALUES.get(flag, 0.25)


MEMORY_TIER = {"tiers": {"memory": "1GiB"}}


def file_tier(volume, **file):
    return {"tiers": {"file": {"size": "1GiB", "volume": volume, **file}}}


FILE_TIER = file_tier("emptyDir")
SOURCES = {"emptyDir": {}, "claimTemplate": {}, "claim": {"claimName": "c"}, "hostPath": {"path": "/t"}}
BY_SCHEMA = {
    "a value that does not exist": ({"modell": {}}, "modell"),
    "a nested one": ({"router": {"replica": 3}}, "replica"),
    "a flag that does not exist": ({"decode": {"flags": {"kv-page": 3}}}, "kv-page"),
    "a flag of another service": ({"router": {"flags": {"kv-pages": 3}}}, "kv-pages"),
    "a flag that the chart sets": ({"router": {"flags": {"port": 7}}}, "port"),
    "one that has a value of its own": ({"decode": {"flags": {"dp-size": 2}}}, "dp-size"),
    "the device, which gpus says": ({"decode": {"flags": {"device": "cuda"}}}, "device"),
    "the cluster, which is everybody's": ({"decode": {"flags": {"cluster": "b"}}}, "cluster"),
    "the chunk size, which is prefill's": ({"router": {"flags": {"chunk-size": 3}}}, "chunk-size"),
    "memory that pods would have to share": ({"decode": {"flags": {"transport": "local"}}}, "transport"),
    "the speed of the engine for tests": ({"decode": {"flags": {"fake-step-s": 1}}}, "fake-step-s"),
    "a tier as a flag": ({"decode": {"flags": {"kv-tier": ["memory:1GiB"]}}}, "kv-tier"),
    "a tier's size as a quantity": ({"decode": {"tiers": {"memory": "1Gi"}}}, "/decode/tiers/memory"),
    "a tier of nothing": ({"decode": {"tiers": {"file": {"size": "0GiB"}}}}, "/decode/tiers/file/size"),
    "a volume for tiers that nobody knows": (
        {"decode": {"tiers": {"file": {"volume": "nfs"}}}}, "/decode/tiers/file/volume"
    ),
    "a flag of the wrong type": ({"decode": {"flags": {"kv-pages": "many"}}}, "/decode/flags/kv-pages"),
    "a flag of no known value": ({"router": {"flags": {"log-level": "loud"}}}, "/router/flags/log-level"),
    "a list that is none": ({"router": {"flags": {"plans": "remote"}}}, "/router/flags/plans"),
    "an item of no known value": ({"router": {"flags": {"plans": ["near"]}}}, "/router/flags/plans/0"),
    "an engine nobody has": ({"decode": {"engine": "vllm"}}, "/decode/engine"),
    "the engine for tests": ({"decode": {"engine": "fake"}}, "/decode/engine"),
    "no rank at all": ({"decode": {"dpSize": 0}}, "/decode/dpSize"),
    "half a GPU": ({"decode": {"gpus": 0.5}}, "/decode/gpus"),
    "a path that is none": ({"model": {"path": "models/x"}}, "/model/path"),
    "a path with a slash at its end": ({"model": {"path": "/models/x/"}}, "/model/path"),
    "a state that etcd does not know": ({"etcd": {"initialClusterState": "old"}}, "initialClusterState"),
    "two members of etcd": ({"etcd": {"replicas": 2}}, "/etcd/replicas"),
    "an etcd that loses consistency": ({"etcd": {"image": {"tag": "v3.5.1"}}}, "/etcd/image/tag"),
    "an etcd without /livez": ({"etcd": {"image": {"tag": "v3.5.10"}}}, "/etcd/image/tag"),
    "whatever etcd is newest": ({"etcd": {"image": {"tag": "latest"}}}, "/etcd/image/tag"),
    "an endpoint without its port": ({"etcd": {"external": {"endpoints": ["etcd"]}}}, "endpoints/0"),
    "a quota beyond etcd's": ({"etcd": {"quotaBytes": 10**11}}, "/etcd/quotaBytes"),
    "two kinds of budget": ({"router": {"podDisruptionBudget": {"minAvailable": 1}}}, "podDisruptionBudget"),
    "an endpoint of IPv6 without brackets": (
        {"etcd": {"external": {"endpoints": ["fd00::1:2379"]}}}, "endpoints/0"
    ),
    "traces to nowhere": ({"tracing": {"endpoint": "collector"}}, "/tracing/endpoint"),
    "memory in words": ({"decode": {"sharedMemory": "much"}}, "/decode/sharedMemory"),
    "a peer that is everybody": ({"networkPolicy": {"peers": [{}]}}, "/networkPolicy/peers/0"),
    "maybe": ({"monitoring": {"serviceMonitors": "maybe"}}, "/monitoring/serviceMonitors"),
    "no worker at all": ({"autoscaling": {"decode": {"minReplicas": 0}}}, "/autoscaling/decode/minReplicas"),
    "a pause beyond Kubernetes'": ({"autoscaling": {"cooldownSeconds": 3601}}, "cooldownSeconds"),
    "a Prometheus without its scheme": (
        {"autoscaling": {"prometheus": {"address": "prometheus:9090"}}}, "/autoscaling/prometheus/address"
    ),
}  # fmt: skip

BY_TEMPLATE = {
    "no model": ({"model": {"path": ""}}, "model.path is required"),
    "a volume that is not named": ({"model": {"source": "volume"}}, "model.volume must say which"),
    "a volume that is not used": (
        {"model": {"volume": {"emptyDir": {}}}}, "model.volume is for model.source volume"
    ),
    "a model outside its volume": (
        {"model": {"path": "/elsewhere/m", "source": "volume", "volume": {"emptyDir": {}}}},
        "must lie in model.mountPath /models",
    ),
    "a volume's namesake": (
        {"model": {"path": "/models2/m", "source": "volume", "volume": {"emptyDir": {}}}},
        "must lie in model.mountPath /models",
    ),
    "SGLang without GPUs": ({"decode": {"engine": "sglang"}}, "engine sglang needs a GPU"),
    "fewer GPUs than ranks": ({"decode": GPU | {"gpus": 4}, "prefill": GPU}, "each of its 8 DP ranks"),
    "torch ranks on GPUs": ({"decode": {"gpus": 1, "dpSize": 2}}, "has one rank and one GPU"),
    "torch with more GPUs than it uses": ({"prefill": {"gpus": 2}}, "has one rank and one GPU"),
    "SGLang's flags for torch": (
        {"decode": {"flags": {"engine-arg": ["--x"]}}}, "engine-arg is for engine sglang"
    ),
    "pages of two sizes": ({"decode": {"flags": {"page-size": 32}}}, "page-size is 64 for prefill and 32"),
    "KV of two types": (
        {"prefill": {"flags": {"dtype": "float16"}}, "decode": {"flags": {"dtype": "bfloat16"}}},
        "dtype is float16 for prefill and bfloat16",
    ),
    "a page larger than a block": (
        {"prefill": {"flags": {"page-size": 128}}, "decode": {"flags": {"page-size": 128}}},
        "flags.index-block is 64, which prefill.flags.page-size 128 does not divide",
    ),
    "blocks that pages do not fill": ({"flags": {"index-block": 96}}, "page-size 64 does not divide"),
    **{
        f"SGLang with {flag}": (
            {"prefill": GPU, "decode": GPU | {"flags": {flag: a_value(flag)}}},
            f"decode.flags.{flag} is for engine torch",
        )
        for flag in (*NOT_SGLANG, *DRAFTING, "draft-model", "kv-dtype")
    },
    **{
        f"prefill with {flag}": (
            {"prefill": {"flags": {flag: a_value(flag)}}}, f"prefill.flags.{flag}: only decode ranks heed it"
        )
        for flag in of_role("decode")
    },
    **{
        f"decode with {flag}": (
            {"decode": {"flags": {flag: a_value(flag)}}}, f"decode.flags.{flag}: only prefill ranks heed it"
        )
        for flag in of_role("prefill")
    },
    "tiers of SGLang": ({"prefill": GPU, "decode": GPU | MEMORY_TIER}, "decode.tiers is for engine torch"),
    "a limit on writes to no file": (
        {"decode": {"flags": {"kv-tier-write-mbps": 50}} | MEMORY_TIER}, "limits decode.tiers.file"
    ),
    "files of others beside none of its own": (
        {"decode": {"flags": {"kv-tier-shared": "on"}} | MEMORY_TIER}, "-shared reads decode.tiers.file"
    ),
    "tiers of no cache": (
        {"prefill": {"flags": {"prefill-cache": "off"}} | FILE_TIER}, "prefill.flags.prefill-cache has"
    ),
    "a directory of no node's": (
        {"decode": file_tier("hostPath")}, "decode.tiers.file.path must say which"
    ),
    "a claim without its name": (
        {"decode": file_tier("claim")}, "decode.tiers.file.claimName must say which"
    ),
    **{
        f"a tier's {name} with another volume": (
            {"decode": file_tier(volume, **SOURCES[volume], **{name: value})}, f"tiers.file.{name} is for"
        )
        for name, value, volume in [
            ("path", "/tiers", "emptyDir"),
            ("medium", "Memory", "claimTemplate"),
            ("storageClassName", "fast", "claim"),
            ("claimName", "tiers", "hostPath"),
        ]
    },
    "two engines": ({"decode": GPU}, "must be the same"),
    "a name of clients without mutual TLS": (
        {"tls": {"secretName": "s", "peerName": "n"}},
        "tls.peerName and tls.clientCaConfigMap need tls.mutual",
    ),
    "mutual TLS without certificates": ({"tls": {"mutual": True}}, "tls.mutual needs tls.secretName"),
    "members of etcd that could not come back": (
        {"etcd": {"persistence": {"enabled": False}}}, "etcd.replicas is 3: without etcd.persistence"
    ),
    "a user of our own etcd": (
        {"etcd": {"external": {"user": "u", "passwordSecret": "s"}}}, "the chart's own etcd has no users"
    ),
    "a user without a password": (
        {"etcd": {"external": {"endpoints": ["e:1"], "user": "u"}}}, "go together"
    ),
    "an Ingress for no host": ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.host"),
    "an Ingress that would be shut out": (
        {
            "ingress": {"enabled": True, "host": "llm.example.com"},
            "tls": {"secretName": "s", "mutual": True},
        },
        "ingress.enabled and tls.mutual exclude each other",
    ),
    "a route without a Gateway": ({"gateway": {"enabled": True}}, "gateway.parentRefs"),
    "a Gateway that cannot trust us": (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}]}, "tls": {"secretName": "s"}},
        "gateway.caConfigMap",
    ),
    "a Gateway that would be shut out": (
        {
            "gateway": {"enabled": True, "parentRefs": [{"name": "g"}], "caConfigMap": "c"},
            "tls": {"secretName": "s", "mutual": True},
        },
        "gateway.enabled and tls.mutual exclude each other",
    ),
    "fewer at most than at least": (
        {"router": {"autoscaling": {"minReplicas": 9}}}, "minReplicas is above maxReplicas"
    ),
    "workers that nobody plans": (
        {"autoscaling": PLANNED["autoscaling"]}, "plan-itl-ms: routers without a goal plan nothing"
    ),
    "plans for no request": (
        merged(PLANNED, {"router": {"flags": {"plan-window-s": 0}}}), "router.flags.plan-window-s is 0"
    ),
    "plans that nobody tells": (
        merged(PLANNED, {"autoscaling": {"prometheus": {"address": ""}}}), "autoscaling.prometheus.address"
    ),
    "a way to ask without its secrets": (
        merged(PLANNED, {"autoscaling": {"prometheus": {"authModes": "basic"}}}),
        "authModes needs autoscaling.prometheus.triggerAuthentication",
    ),
    "fewer workers at most than at least": (
        merged(PLANNED, {"autoscaling": {"prefill": {"minReplicas": 5}}}),
        "autoscaling.prefill.minReplicas is above maxReplicas: 5 and 4",
    ),
    "a planned number of groups of nodes": (
        merged(PLANNED, {"prefill": GPU, "decode": GPU | {"nodes": 2}}),
        "autoscaling.enabled and decode.nodes 2 exclude each other",
    ),
    "workers that leave for longer than Kubernetes waits": (
        merged(PLANNED, {"decode": {"flags": {"grace-s": 1800}}}), "a decode worker may take 1835 s to leave"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_SCHEMA)
def test_the_schema_refuses(case):
    values, named = BY_SCHEMA[case]
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render(merged(LEAST, values))
    assert named in str(refusal.value)


@pytest.mark.parametrize("case", BY_TEMPLATE)
def test_what_does_not_go_together_is_refused(case):
    values, sentence = BY_TEMPLATE[case]
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(merged(LEAST, values))
    assert sentence in str(refusal.value)


TLS = {"etcd": {"tls": {"secretName": "s"}}}
STATEFUL_SET = 'lookup "apps/v1" "StatefulSet" .Release.Namespace $name'
CLAIM = (
    'lookup "v1" "PersistentVolumeClaim" $.Release.Namespace (printf "data-%s-%d" $name $member)'
)  # fmt: skip


def found(chart, lookup, instead):
    """As if the cluster had that: rendered offline, Helm finds nothing there."""
    refusals = chart / "templates" / "_etcd_refusals.tpl"
    text = refusals.read_text()
    assert text.count(lookup) == 1
    refusals.write_text(text.replace(lookup, instead))


def running(chart, values):
    """The etcd that the values give."""
    spec = json.dumps(json.dumps(render(values).of("StatefulSet")["etcd"]))
    found(chart, STATEFUL_SET, f"fromJson {spec}")


def refused(values, chart):
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(merged(LEAST, values), chart)
    return str(refusal.value)


def test_the_members_of_an_etcd_that_runs_stay_as_many(chart_copy):
    running(chart_copy, LEAST)
    assert render(LEAST, chart_copy).of("StatefulSet")["etcd"]["spec"]["replicas"] == 3
    assert "etcd.replicas is 5, and isthmus-etcd has 3 members" in refused(
        {"etcd": {"replicas": 5}}, chart_copy
    )
    external = {"etcd": {"replicas": 5, "external": {"endpoints": ["e:2379"]}}}
    assert "etcd" not in render(merged(LEAST, external), chart_copy).of("StatefulSet")


@pytest.mark.parametrize(("now", "wanted", "how"), [({}, TLS, "without TLS"), (TLS, {}, "with TLS")])
def test_members_that_know_each_other_by_their_urls_keep_them(now, wanted, how, chart_copy):
    running(chart_copy, merged(LEAST, now))
    render(merged(LEAST, now), chart_copy)
    sentence = f"etcd.tls.secretName: the members of isthmus-etcd know each other {how}"
    assert sentence in refused(wanted, chart_copy)


def test_a_single_member_needs_no_other_s_url(chart_copy):
    one = merged(LEAST, {"etcd": {"replicas": 1}})
    running(chart_copy, one)
    render(merged(one, TLS), chart_copy)


def disk(**persistence):
    return {"etcd": {"replicas": 1, "persistence": persistence}}


@pytest.mark.parametrize(
    ("now", "same"),
    [("8Gi", "8192Mi"), ("512Mi", "0.5Gi"), ("1000M", "1G"), ("64Gi", "64Gi"), ("2Ti", "2048Gi")],
)
def test_a_size_that_is_only_written_in_another_way_is_the_same(now, same, chart_copy):
    running(chart_copy, merged(LEAST, disk(size=now)))
    render(merged(LEAST, disk(size=same)), chart_copy)
    assert f"etcd.persistence.size is 3T, and the volumes of isthmus-etcd were made with {now}" in refused(
        disk(size="3T"), chart_copy
    )


def test_volumes_are_what_they_were_made(chart_copy):
    """Kubernetes refuses another template of them when the upgrade is half done."""
    running(chart_copy, merged(LEAST, disk(size="8Gi")))
    render(merged(LEAST, disk(size="8Gi")), chart_copy)
    said = refused(disk(size="16Gi"), chart_copy)
    assert "kubectl delete statefulset isthmus-etcd --cascade=orphan" in said
    assert "each claim data-isthmus-etcd-0 and so on to 16Gi" in said
    assert 'etcd.persistence.storageClassName is "ssd"' in refused(disk(storageClassName="ssd"), chart_copy)
    assert "isthmus-etcd was installed with volumes" in refused(disk(enabled=False), chart_copy)


def test_an_etcd_without_volumes_gets_none_later(chart_copy):
    running(chart_copy, merged(LEAST, disk(enabled=False)))
    render(merged(LEAST, disk(enabled=False)), chart_copy)
    assert "isthmus-etcd was installed without volumes" in refused(disk(enabled=True), chart_copy)


def test_the_volumes_of_an_earlier_release_fit_as_many_members(chart_copy):
    """helm uninstall leaves them."""
    found(chart_copy, CLAIM, "lt $member 3")
    render(LEAST, chart_copy)
    sentence = "etcd.replicas is 1, and of an earlier isthmus-etcd with 3 members the volume claims are left"
    assert sentence in refused({"etcd": {"replicas": 1}}, chart_copy)
    render(merged(LEAST, {"etcd": {"replicas": 1, "persistence": {"enabled": False}}}), chart_copy)


def test_a_member_whose_claim_was_deleted_may_be_replaced(chart_copy):
    """As docs/operations.md has it; more claims than members are refused all the same."""
    replacing = {"etcd": {"initialClusterState": "existing"}}
    found(chart_copy, CLAIM, "lt $member 2")
    assert "with 2 members the volume claims are left" in refused({}, chart_copy)
    render(merged(LEAST, replacing), chart_copy)
    assert "etcd.replicas is 1" in refused(merged(replacing, {"etcd": {"replicas": 1}}), chart_copy)


def test_each_role_has_flags_of_its_own():
    assert set(of_role("decode")) >= {"decode-cache", "itl-target-ms", "speculation"}
    assert of_role("prefill") == ["prefill-cache", "expect-kv-path"]
    own = {role: {"flags": {flag: a_value(flag) for flag in of_role(role)}} for role in ("decode", "prefill")}
    objects = render(merged(LEAST, own))
    assert (objects.config("decode").decode_cache, objects.config("prefill").prefill_cache) == ("off", "off")


def test_what_goes_together_is_not_refused():
    pages = {"flags": {"page-size": 16, "dtype": "bfloat16"}}
    render(merged(LEAST, {"prefill": pages, "decode": pages, "flags": {"index-block": 48}}))
    render(merged(LEAST, {"prefill": {"flags": {"page-size": 64, "dtype": "bfloat16"}}}))
    blocks = merged(LEAST, {"flags": {"index-block": None}})
    objects = render(blocks)
    # The sentences reckon with these where nothing is set.
    assert (objects.config("decode").page_size, objects.config("decode").index_block) == (64, 64)


@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_every_flag_of_the_code_is_the_user_s_or_the_chart_s(component):
    """None can be said in two places, and none is forgotten."""
    with helm_python.Chart.load(CHART) as chart:
        definitions = chart.schema["definitions"]
    names = {"router": "routerFlags"}.get(component, "rankFlags")
    flags = set(definitions[names]["properties"])
    cls = RouterConfig if component == "router" else RankConfig
    known = {flag.name for flag in describe(cls)}
    assert flags <= known
    shared = set(definitions["commonFlags"]["properties"])
    assert shared <= {flag.name for flag in describe(ClusterConfig)}
    set_by_chart = {text[2:].split("=")[0] for text in render(LEAST).arguments(component)}
    optional = {
        "otlp-endpoint",
        "etcd-user",
        "etcd-password-file",
        "rank-index",
        "kv-tier",
        "kv-tier-fd",
        "chunk-size",
        "api-key-file",
        "tenants",
        "models",
    }
    optional |= {f"{of}-{file}" for of in ("tls", "etcd") for file in ("ca", "cert", "key")}
    optional |= {"tls-mutual", "tls-server-name", "tls-peer-name", "tls-client-ca", "api-key-file"}
    optional |= {"transport", "fake-step-s", "fake-prompt-token-s"}  # of no use in pods
    assert known - flags - shared - optional <= set_by_chart
