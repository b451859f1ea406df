"""These tests show how many pods there are, where they stand and how they are replaced."""

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


PLANNED = {
    "router": {"flags": {"plan-ttft-s": 2.5}},
    "autoscaling": {
        "enabled": True,
        "decode": {"minReplicas": 2, "maxReplicas": 9},
        "cooldownSeconds": 600,
        "prometheus": {"address": "http://prometheus.monitoring:9090"},
    },
}


def test_workers_are_as_many_as_routers_plan():
    workers = {"prefill": {"dpSize": 2}, "decode": {"replicas": 5, "flags": {"hand-over-s": 90}}}
    objects = render(merged(LEAST, PLANNED, workers))
    scalers = objects.of("ScaledObject")
    assert set(scalers) == {"prefill", "decode"}
    for role, bounds, leaving_s, ranks in [("prefill", (1, 4), 65, 2), ("decode", (2, 9), 145, 1)]:
        workload, scaler = objects.of("StatefulSet")[role], scalers[role]["spec"]
        assert "replicas" not in workload["spec"]
        target = {name: workload[name] for name in ("apiVersion", "kind")}
        assert scaler["scaleTargetRef"] == target | {"name": workload["metadata"]["name"]}
        assert (scaler["minReplicaCount"], scaler["maxReplicaCount"]) == bounds
        down = scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        policy = {"type": "Pods", "value": 1, "periodSeconds": leaving_s}
        assert down == {"stabilizationWindowSeconds": 600, "policies": [policy]}
        assert objects.pods()[role]["terminationGracePeriodSeconds"] == leaving_s
        (trigger,) = scaler["triggers"]
        assert trigger["type"] == "prometheus" and trigger["metricType"] == "AverageValue"
        config = objects.config(role)
        page = f'isthmus_cluster="{config.cluster}",model="{config.served_name}"'
        age_s = objects.config("router").plan_every_s * 10
        assert trigger["metadata"] == {
            "serverAddress": "http://prometheus.monitoring:9090",
            "query": f'ceil(max(isthmus_plan_wanted_ranks{{{page},role="{role}"}} and on(instance) '
            f"isthmus_plan_age_seconds{{{page}}} < {age_s:.0f}) / {ranks})",
            "threshold": "1",
            "ignoreNullValues": "false",
        }
    assert "with an autoscaler's number of prefill and an autoscaler's number of decode" in objects.notes
    assert not rendered("least").of("ScaledObject")


def test_what_is_planned_is_asked_for_as_a_release_names_it_and_with_what_prometheus_asks_for():
    asks = {"triggerAuthentication": "123", "authModes": "tls,basic"}
    values = {
        "flags": {"model-name": "chat", "cluster": "east"},
        "router": {"flags": {"plan-every-s": 7}},
        "autoscaling": {"prometheus": asks},
    }
    for scaler in render(merged(LEAST, PLANNED, values)).of("ScaledObject").values():
        (trigger,) = scaler["spec"]["triggers"]
        assert trigger["authenticationRef"] == {"name": "123"}  # a name, and no number
        assert trigger["metadata"]["authModes"] == "tls,basic"
        page = 'isthmus_cluster="east",model="chat"'
        assert trigger["metadata"]["query"].count(page) == 2
        assert trigger["metadata"]["query"].endswith(f"isthmus_plan_age_seconds{{{page}}} < 70) / 1)")
