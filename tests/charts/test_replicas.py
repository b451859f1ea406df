"""How many pods there are, where they stand and how they are replaced."""

import kubernetes_validate
import pytest

from charts.rendering import LEAST, NAMES, merged, render, rendered


def test_how_pods_are_replaced_is_the_user_s_to_say():
    least = rendered("least").workloads()
    assert least["router"]["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert least["decode"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    values = {
        "router": {"updateStrategy": {"rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 1}}},
        "prefill": {"updateStrategy": {"type": "OnDelete"}},
        "decode": {
            "updateStrategy": {"rollingUpdate": {"maxUnavailable": 2, "partition": 3}},
            "podDisruptionBudget": {"maxUnavailable": 2},
        },
    }
    objects = render(merged(LEAST, values))
    workloads = objects.workloads()
    assert workloads["router"]["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": "50%",
        "maxUnavailable": 1,
    }
    assert workloads["prefill"]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert workloads["decode"]["spec"]["updateStrategy"]["rollingUpdate"] == {
        "maxUnavailable": 2,
        "partition": 3,
    }
    assert objects.of("PodDisruptionBudget")["decode"]["spec"]["maxUnavailable"] == 2
    for item in objects.all:
        if item["kind"] in ("StatefulSet", "Deployment"):
            kubernetes_validate.validate(item, "1.37", strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_budgets_and_spread_select_exactly_their_pods(name):
    objects = rendered(name)
    for component, workload in objects.workloads().items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        budget = objects.of("PodDisruptionBudget")[component]["spec"]
        assert budget["maxUnavailable"] == 1
        constraints = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert "kubernetes.io/hostname" in {c["topologyKey"] for c in constraints} or name == "production"
        selectors = [budget["selector"], *(c["labelSelector"] for c in constraints)]
        for selector in selectors:
            others = [w for other, w in objects.workloads().items() if other != component]
            assert selector["matchLabels"].items() <= labels.items()
            for other in others:
                their_labels = other["spec"]["template"]["metadata"]["labels"]
                assert not selector["matchLabels"].items() <= their_labels.items()


def test_a_new_chart_version_alone_restarts_no_pod():
    labels = rendered("least").of("StatefulSet")["decode"]["spec"]["template"]["metadata"]["labels"]
    assert not any("version" in key or "chart" in key for key in labels)


def test_routers_scale_with_their_load_and_yield_to_the_autoscaler():
    objects = rendered("least")
    scaler = objects.of("HorizontalPodAutoscaler")["router"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == objects.of("Deployment")["router"]["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert "replicas" not in objects.of("Deployment")["router"]["spec"]
    fixed = render(merged(LEAST, {"router": {"autoscaling": {"enabled": False}}}))
    assert fixed.of("Deployment")["router"]["spec"]["replicas"] == 2
    assert not fixed.of("HorizontalPodAutoscaler")


def test_workers_are_as_many_as_an_autoscaler_says_where_it_does():
    """helm upgrade would set a number back."""
    objects = render(merged(LEAST, {"decode": {"replicas": None}}))
    assert "replicas" not in objects.of("StatefulSet")["decode"]["spec"]
    assert objects.of("StatefulSet")["prefill"]["spec"]["replicas"] == 1
    assert "with 1 prefill and an autoscaler's number of decode worker(s)" in objects.notes
