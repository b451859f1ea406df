"""Dashboards, alerts and scrape targets: whatever lies in the chart's folders becomes an object."""

import json
import re

import helm_python
import pytest
import yaml

from charts.rendering import CHART, LEAST, merged, render, rendered
from observe import alert_rules

ON = merged(LEAST, {"monitoring": {"serviceMonitors": True, "prometheusRules": True}})
ALERTS = {
    "groups": [
        {
            "name": "isthmus",
            "rules": [
                {
                    "alert": "IsthmusRankDown",
                    "expr": "up == 0",
                    "for": "5m",
                    "labels": {"severity": "page"},
                    "annotations": {"summary": "{{ $labels.instance }} is {{ $value | humanize }} down"},
                }
            ],
        }
    ]
}
DASHBOARD = {"title": "Overview", "panels": [], "templating": {"list": [{"query": "{{ not Helm's }}"}]}}


def of_release(objects, kind, prefix):
    return {name: item for name, item in objects.of(kind).items() if name.startswith(prefix)}


@pytest.fixture
def chart(chart_copy):
    """With one dashboard and one file of alerts of ours, beside those that are there."""
    for folder in ("dashboards", "alerts"):
        (chart_copy / folder).mkdir(exist_ok=True)
    (chart_copy / "dashboards" / "made_up.json").write_text(json.dumps(DASHBOARD, indent=2))
    (chart_copy / "alerts" / "made_up.yaml").write_text(yaml.safe_dump(ALERTS))
    return chart_copy


def test_a_dashboard_becomes_a_configmap_that_grafana_s_sidecar_finds(chart):
    config_map = of_release(render(LEAST, chart), "ConfigMap", "dashboard-")["dashboard-made-up"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["annotations"] == {"grafana_folder": "Isthmus"}
    assert json.loads(config_map["data"]["isthmus-made_up.json"]) == DASHBOARD


def test_alerts_become_a_rule_object_word_by_word(chart):
    rule = of_release(render(ON, chart), "PrometheusRule", "alerts-")["alerts-made-up"]
    assert rule["spec"] == ALERTS


def test_every_file_that_is_there_is_rendered():
    objects = render(ON)
    # Grafana's sidecar makes files of the keys, in one folder with those of other charts.
    dashboards = {f"isthmus-{path.name}" for path in (CHART / "dashboards").glob("*.json")}
    found = {
        name for item in of_release(objects, "ConfigMap", "dashboard-").values() for name in item["data"]
    }
    assert found == dashboards
    rules = list(of_release(objects, "PrometheusRule", "alerts-").values())
    paths = sorted((CHART / "alerts").glob("*.yaml"))
    # As the alerts' own tests render them: with the default goals, and nowhere to read on.
    assert [rule["spec"] for rule in rules] == [
        yaml.safe_load(alert_rules.rendered(path, runbooks="")) for path in paths
    ]
    for config_map in of_release(objects, "ConfigMap", "dashboard-").values():
        assert len(json.dumps(config_map)) < 1_000_000  # Kubernetes takes a mebibyte


@pytest.mark.parametrize("release", ["isthmus", "a-release-with-a-name-of-more-than-forty-letters"])
def test_the_alert_for_targets_that_are_down_finds_ours(release):
    """Prometheus's operator would name a job after its Service, whose name is cut."""
    objects = render(ON, release=release)
    (expression,) = {
        rule["expr"]
        for item in objects.of("PrometheusRule").values()
        for group in item["spec"]["groups"]
        for rule in group["rules"]
        if rule["expr"].startswith("up{")
    }
    pattern = re.search(r'job=~"([^"]+)"', expression)[1]
    monitors = objects.of("ServiceMonitor").values()
    relabelings = [item for m in monitors for end in m["spec"]["endpoints"] for item in end["relabelings"]]
    assert {item["targetLabel"] for item in relabelings} == {"job"}
    jobs = {item["replacement"] for item in relabelings}
    assert len(jobs) == 4 and all(re.fullmatch(pattern, job) for job in jobs)


def test_every_metrics_port_is_scraped_through_a_service_that_has_it():
    objects = render(merged(ON, {"decode": {"dpSize": 3}}))
    monitors = objects.of("ServiceMonitor")
    assert set(monitors) == {"router", "prefill", "decode", "etcd"}
    for name, monitor in monitors.items():
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        services = [s for s in objects.of("Service").values() if selector <= s["metadata"]["labels"].items()]
        offered = {port["name"] for service in services for port in service["spec"]["ports"]}
        scraped = [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]]
        assert set(scraped) <= offered, name
        assert all(endpoint["honorLabels"] for endpoint in monitor["spec"]["endpoints"])
        ports = {port["name"] for port in objects.container(name)["ports"]}
        assert set(scraped) == {port for port in ports if port.startswith("metrics")}


def test_goals_and_the_runbooks_address_are_values():
    goals = {"ttftSeconds": 10, "ttftShare": 0.99, "successShare": 0.9995, "ranksDownShare": 0}
    values = merged(ON, {"monitoring": {"goals": goals, "runbooksUrl": alert_rules.RUNBOOKS}})
    (rule,) = of_release(render(values), "PrometheusRule", "alerts-").values()
    assert rule["spec"] == yaml.safe_load(alert_rules.rendered(CHART / "alerts/isthmus.yaml", goals))
    assert "@" not in str(rule["spec"]) and 'le="10.0"' in str(rule["spec"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("ttftSeconds", 2), ("ttftShare", 1), ("ttftShare", 95), ("successShare", 0.5), ("ranksDownShare", 20)],
)
def test_a_goal_that_nothing_could_be_held_to_is_refused(name, value):
    with pytest.raises(helm_python.HelmError, match=name):
        render(merged(ON, {"monitoring": {"goals": {name: value}}}))


def test_a_link_to_a_runbook_is_one_that_can_be_followed():
    with pytest.raises(helm_python.HelmError, match="runbooksUrl"):
        render(merged(ON, {"monitoring": {"runbooksUrl": "docs/runbooks.md"}}))
    alerts = [
        rule
        for item in rendered("production").of("PrometheusRule").values()
        for group in item["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert alerts and all(a["annotations"]["runbook_url"].startswith("https://") for a in alerts)


def test_labels_that_the_operator_selects_by():
    for kind in ("ServiceMonitor", "PrometheusRule"):
        for item in rendered("production").of(kind).values():
            assert item["metadata"]["labels"]["release"] == "prometheus"


def test_without_the_operator_none_of_its_objects(chart):
    """Rendered offline, auto finds no such API; the cluster would refuse the objects."""
    objects = render(LEAST, chart)
    assert not objects.of("ServiceMonitor") and not objects.of("PrometheusRule")


def test_dashboards_can_be_left_out(chart):
    off = {"monitoring": {"dashboards": {"enabled": False}}}
    assert not of_release(render(merged(LEAST, off), chart), "ConfigMap", "dashboard-")


def test_an_external_etcd_is_not_ours_to_scrape():
    objects = render(merged(ON, {"etcd": {"external": {"endpoints": ["e:2379"]}}}))
    assert set(objects.of("ServiceMonitor")) == {"router", "prefill", "decode"}
