"""These tests show who may talk to whom."""

import pytest

from charts.rendering import LEAST, OURS, merged, render, rendered


def allowed(objects, source, target, port):
    """Do the policies let a pod of our component `source` reach `target`'s port? source None: a stranger."""
    labels = {name: w["spec"]["template"]["metadata"]["labels"] for name, w in objects.workloads().items()}
    labels |= {name: pod["metadata"]["labels"] for name, pod in objects.of("Pod").items()}

    def matches(peer, component):
        if component is None or "podSelector" not in peer or "namespaceSelector" in peer:
            return False
        selector = peer["podSelector"]
        wanted = selector.get("matchLabels", {}).items() <= labels[component].items()
        return wanted and all(
            labels[component].get(e["key"]) in e["values"] for e in selector.get("matchExpressions", [])
        )

    def passes(rules, side, component):
        for rule in rules:
            ports = [p["port"] for p in rule.get("ports", [])]
            peers = rule.get(side, [])
            if (not ports or port in ports) and (not peers or any(matches(p, component) for p in peers)):
                return True
        return False

    policies = objects.of("NetworkPolicy")
    enters = passes(policies[target]["spec"]["ingress"], "from", source)
    leaves = source not in policies or passes(policies[source]["spec"]["egress"], "to", target)
    return enters and leaves


@pytest.mark.parametrize("name", ["least", "production"])
def test_policies_let_the_cluster_work(name):
    objects = rendered(name)
    assert set(objects.of("NetworkPolicy")) == {"router", "prefill", "decode", "etcd"}
    for source in OURS:
        assert allowed(objects, source, "etcd", 2379), source
        for target in ("prefill", "decode"):  # KV crosses at ports that UCX chooses
            assert allowed(objects, source, target, 7000) and allowed(objects, source, target, 45678)
    assert allowed(objects, "etcd", "etcd", 2380)
    assert allowed(objects, "test", "router", 7777)
    for target, port in (("router", 8080), ("prefill", 8080), ("decode", 8080), ("etcd", 2381)):
        assert allowed(objects, None, target, port)  # probes


@pytest.mark.parametrize("name", ["least", "production"])
def test_policies_keep_strangers_away(name):
    objects = rendered(name)
    assert not allowed(objects, None, "etcd", 2379)
    assert not allowed(objects, "test", "etcd", 2379)
    assert not allowed(objects, None, "decode", 7000)
    assert not allowed(objects, "etcd", "decode", 7000)
    assert not allowed(objects, "decode", "router", 7777) or name == "least"
    assert not allowed(objects, "router", "etcd", 2380)
    assert allowed(objects, None, "router", 8000) == (name == "least")  # production names its clients
    assert allowed(objects, None, "decode", 9400) == (name == "least")


def test_two_releases_that_are_one_cluster_reach_each_other():
    """Each names the other's pods; the other has its etcd here."""
    peer = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "more-decode"}}}
    policies = render(merged(LEAST, {"networkPolicy": {"peers": [peer]}})).of("NetworkPolicy")

    def rules(component, direction, side):
        return [
            rule.get("ports") for rule in policies[component]["spec"][direction] if peer in rule.get(side, [])
        ]

    for component in ("prefill", "decode"):
        assert rules(component, "ingress", "from") == [None]  # every port, for UCX chooses its own
    assert rules("etcd", "ingress", "from") == [[{"port": 2379}]]
    assert rules("router", "ingress", "from") == []
    for component in OURS:
        assert rules(component, "egress", "to") == [None]
    assert rules("etcd", "egress", "to") == []


def test_egress_follows_etcd_and_traces_outside():
    values = {
        "etcd": {"external": {"endpoints": ["a.example:2379", "https://b.example:4001"]}},
        "tracing": {"endpoint": "http://collector:4317"},
    }
    objects = render(merged(LEAST, values))
    for component in OURS:
        egress = objects.of("NetworkPolicy")[component]["spec"]["egress"]
        open_ports = {p["port"] for rule in egress if "to" not in rule for p in rule["ports"]}
        assert open_ports == {53, 2379, 4001, 4317}
    assert "etcd" not in objects.of("NetworkPolicy")
    assert "etcd" not in objects.of("StatefulSet")


def test_addresses_of_ipv6_keep_their_ports_apart():
    values = {
        "etcd": {"external": {"endpoints": ["[fd00::1]:2379", "https://[fd00::2]:4001"]}},
        "tracing": {"endpoint": "http://[fd00::3]:4317"},
    }
    objects = render(merged(LEAST, values))
    assert objects.config("router").etcd == ("[fd00::1]:2379", "https://[fd00::2]:4001")
    egress = objects.of("NetworkPolicy")["router"]["spec"]["egress"]
    assert {p["port"] for rule in egress if "to" not in rule for p in rule["ports"]} == {53, 2379, 4001, 4317}


def test_policies_can_be_left_out():
    assert not render(merged(LEAST, {"networkPolicy": {"enabled": False}})).of("NetworkPolicy")
