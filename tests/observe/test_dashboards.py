"""What can be said of dashboards and alerts without Prometheus and Grafana."""

import re

import pytest

from observe.boards import ALERTS, BOARDS, PANELS, REPOSITORY, RULES, metrics_in
from services.router.request.stages import STAGES

RUNBOOKS = (REPOSITORY / "docs/runbooks.md").read_text()


def listed_metrics():
    """Names of docs/metrics.md, histograms with what they are exposed as."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+)", (REPOSITORY / "docs/metrics.md").read_text(), re.MULTILINE)
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, kind in rows for suffix in suffixes.get(kind, ("",))}


@pytest.mark.parametrize("panel", PANELS, ids=str)
def test_a_panel_explains_itself(panel):
    assert 3 < len(panel.title) < 50
    assert panel.json["fieldConfig"]["defaults"]["unit"]
    description = panel.json["description"]
    assert description.endswith(".") and len(description) > 30
    for runbook in re.findall(r"Isthmus[A-Z]\w+", description):
        assert f"\n## {runbook}\n" in RUNBOOKS
    if panel.json["type"] == "timeseries":
        assert all(target["legendFormat"] for target in panel.targets)


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_can_be_narrowed_down(name):
    variables = [variable["name"] for variable in BOARDS[name]["templating"]["list"]]
    assert variables == ["datasource", "cluster", "isthmus_cluster", "role", "worker", "rank"]
    ids = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in BOARDS[name]["panels"]]
    assert len(set(titles)) == len(titles)
    for target in (t for panel in BOARDS[name]["panels"] for t in panel.get("targets", ())):
        for selector in re.findall(r"\w+\{(.*?)\}", target["expr"]):
            assert 'cluster=~"$cluster", isthmus_cluster=~"$isthmus_cluster"' in selector, target["expr"]


def test_every_metric_that_is_asked_for_exists():
    asked = set().union(*(metrics_in(t["expr"]) for panel in PANELS for t in panel.targets))
    asked |= set().union(*(metrics_in(rule["expr"]) for rule in RULES))
    assert not asked - listed_metrics()


def test_dashboard_and_alert_count_the_same_failures():
    (tile,) = [panel for panel in PANELS if panel.title == "Requests that fail"]
    (alert,) = [rule for rule in ALERTS if rule["alert"] == "IsthmusRequestsFail"]
    counted = [
        set(re.findall(r'outcome!~"(.*?)"', expr)) for expr in (tile.targets[0]["expr"], alert["expr"])
    ]
    assert counted[0] == counted[1] and len(counted[0]) == 1


def test_what_is_slow_leads_to_its_trace():
    """Grafana asks for exemplars only where a target says so."""
    shown = {panel.title: [t.get("exemplar", False) for t in panel.targets] for panel in PANELS}
    assert shown["Wait for the first token"] == [True, True, True]
    assert shown["Whole requests"] == [True, True]
    assert "an exemplar on *Wait for the first token* or *Whole requests* on Overview" in RUNBOOKS


def test_the_runbooks_speak_of_panels_and_stages_that_exist():
    titles = {panel.title for panel in PANELS}
    spoken_of = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", RUNBOOKS))
    assert spoken_of and not spoken_of - titles
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", RUNBOOKS, re.MULTILINE))))
    assert set(STAGES) <= told
