"""A worker over several nodes is a LeaderWorkerSet, whose pods have one template."""

import copy
import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from helm_python import HelmError

from charts.rendering import merged, render, sample
from services.engine.sglang.service.sglang_settings import Nodes
from services.rank.rank_config import RankConfig
from services.settings.flags import load

SCHEMA = json.loads((Path(__file__).parent / "leaderworkerset.json").read_text())
OVER_TWO = {"nodes": 2, "dpSize": 16, "flags": {"engine-arg": ["--tp-size=16", "--enable-dp-attention"]}}
NODE = {"LWS_LEADER_ADDRESS": "isthmus-decode-0.isthmus-decode.llm", "POD_IP": "10.0.0.7"}


@pytest.fixture(scope="module")
def objects():
    return render(merged(sample("sglang-dp-attention"), {"decode": OVER_TWO}))


def test_its_fields_exist_and_its_pods_are_ones(objects):
    (item,) = objects.of("LeaderWorkerSet").values()
    jsonschema.validate(item, SCHEMA)
    pod = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "one"}}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    unknown = copy.deepcopy(item)
    unknown["spec"]["leaderWorkerTemplate"]["sizes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="sizes"):
        jsonschema.validate(unknown, SCHEMA)


def test_it_takes_the_place_of_the_role_alone(objects):
    assert set(objects.of("LeaderWorkerSet")) == {"decode"}
    assert "decode" not in objects.of("StatefulSet") and "prefill" in objects.of("StatefulSet")
    first_node = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    for role, selected in (("decode", first_node), ("prefill", {})):
        selector = objects.of("Service")[role]["spec"]["selector"]
        assert {key: value for key, value in selector.items() if key.startswith("leader")} == selected


def test_each_pod_is_told_which_node_it_is(objects):
    for index in ("0", "1"):
        arguments = objects.arguments("decode", 0, LWS_WORKER_INDEX=index, **NODE)
        config = load(RankConfig, arguments, prog="decode")
        assert config.reached_at == NODE["POD_IP"]
        values = dict(text.split("=", 1) for text in config.engine_arg if "=" in text)
        assert values["--tp-size"] == "16"
        assert Nodes.read(values) == Nodes(2, int(index), NODE["LWS_LEADER_ADDRESS"], 7900)


def test_what_several_nodes_cannot_have_is_refused(subtests):
    for change, why in [
        ({"engine": "torch", "gpus": 1, "dpSize": 1, "nodes": 2}, "only a worker of engine sglang"),
        ({"updateStrategy": {"type": "OnDelete"}, "nodes": 2}, "workers of several nodes know RollingUpdate"),
        ({"flags": {"engine-arg": ["--nnodes=2"]}}, "--nnodes=2: decode.nodes says it"),
        ({"flags": {"engine-arg": ["--node-rank=1"]}}, "decode.nodes says it"),
        ({"nodes": 2, "dpSize": 32}, "needs a GPU for each of its 32 DP ranks"),
    ]:
        with subtests.test(why), pytest.raises(HelmError, match=why):
            render(merged(sample("sglang-dp-attention"), {"decode": change}))
