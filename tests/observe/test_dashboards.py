"""These tests show what can be said of dashboards and alerts without Prometheus and Grafana."""

import re

import pytest

from observe.boards import ALERTS, BOARDS, PANELS, REPOSITORY, RULES, metrics_in
from services.router.request.stages import STAGES

pytestmark = pytest.mark.long

GRAPHS = [panel for panel in PANELS if panel.json["type"] == "timeseries"]
RUNBOOKS = (REPOSITORY / "docs/runbooks.md").read_text()


def listed_metrics():
    """Names of docs/metrics.md, histograms with what they are exposed as."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+)", (REPOSITORY / "docs/metrics.md").read_text(), re.MULTILINE)
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, kind in rows for suffix in suffixes.get(kind, ("",))}


def luminance(color):
    """Relative, as in WCAG 2.2; white on less than 0.18 has a contrast of 4.5 and more."""
    parts = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_panels(subtests):
    for panel in PANELS:
        with subtests.test("a panel explains itself", panel=panel):
            assert 3 < len(panel.title) < 50
            assert panel.json["fieldConfig"]["defaults"]["unit"]
            description = panel.json["description"]
            assert description.endswith(".") and len(description) > 30
            for runbook in re.findall(r"Isthmus[A-Z]\w+", description):
                assert f"\n## {runbook}\n" in RUNBOOKS
            if panel.json["type"] == "timeseries":
                assert all(target["legendFormat"] for target in panel.targets)
    for panel in GRAPHS:
        with subtests.test("a graph can be read with 64 ranks", panel=panel):
            defaults, legend = panel.json["fieldConfig"]["defaults"], panel.json["options"]["legend"]
            assert defaults["min"] == 0 and defaults["custom"]["axisWidth"] >= 70
            assert legend["calcs"] == ["lastNotNull", "max"] and legend["displayMode"] == "table"
            for target in panel.targets:
                by_rank = "{{rank}}" in target["legendFormat"]
                assert target["expr"].startswith(("topk(10, ", "bottomk(10, ")) == by_rank, target["expr"]
    with subtests.test("numbers are white on a plain ground"):
        for panel in (panel for panel in PANELS if panel.json["type"] == "stat"):
            options = panel.json["options"]
            assert (options["colorMode"], options["graphMode"]) == ("background_solid", "none")
            grounds = [step["color"] for step in panel.json["fieldConfig"]["defaults"]["thresholds"]["steps"]]
            assert all(luminance(ground) < 0.15 for ground in grounds), panel.title
    with subtests.test("each stage has a colour of its own"):
        (panel,) = [panel for panel in PANELS if panel.title == "TTFT by stage"]
        colors = {
            override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
            for override in panel.json["fieldConfig"]["overrides"]
        }
        assert tuple(colors) == STAGES and len(set(colors.values())) == len(STAGES)


def test_dashboards(subtests):
    for name in BOARDS:
        with subtests.test("a dashboard can be narrowed down", name=name):
            variables = [variable["name"] for variable in BOARDS[name]["templating"]["list"]]
            assert variables == ["datasource", "cluster", "isthmus_cluster", "role", "worker", "rank"]
            ids = [panel["id"] for panel in BOARDS[name]["panels"]]
            assert len(set(ids)) == len(ids)
            titles = [panel["title"] for panel in BOARDS[name]["panels"]]
            assert len(set(titles)) == len(titles)
            for target in (t for panel in BOARDS[name]["panels"] for t in panel.get("targets", ())):
                for selector in re.findall(r"\w+\{(.*?)\}", target["expr"]):
                    assert 'cluster=~"$cluster", isthmus_cluster=~"$isthmus_cluster"' in selector, target[
                        "expr"
                    ]
    with subtests.test("every metric that is asked for exists"):
        asked = set().union(*(metrics_in(t["expr"]) for panel in PANELS for t in panel.targets))
        asked |= set().union(*(metrics_in(rule["expr"]) for rule in RULES))
        assert not asked - listed_metrics()
    with subtests.test("dashboard and alert count the same failures"):
        (tile,) = [panel for panel in PANELS if panel.title == "Error rate"]
        (alert,) = [rule for rule in ALERTS if rule["alert"] == "IsthmusRequestsFail"]
        counted = [
            set(re.findall(r'outcome!~"(.*?)"', expr)) for expr in (tile.targets[0]["expr"], alert["expr"])
        ]
        assert counted[0] == counted[1] and len(counted[0]) == 1
    # Grafana asks for exemplars only where a target says so.
    with subtests.test("what is slow leads to its trace"):
        shown = {panel.title: [t.get("exemplar", False) for t in panel.targets] for panel in PANELS}
        assert shown["TTFT p50, p95, p99"] == [True, True, True]
        assert shown["Request latency p50, p95"] == [True, True]
        assert "an exemplar on *TTFT p50, p95, p99* or *Request latency p50, p95* on Overview" in RUNBOOKS
    with subtests.test("the runbooks speak of panels and stages that exist"):
        titles = {panel.title for panel in PANELS}
        spoken_of = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", RUNBOOKS))
        assert spoken_of and not spoken_of - titles
        told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", RUNBOOKS, re.MULTILINE))))
        assert set(STAGES) <= told
