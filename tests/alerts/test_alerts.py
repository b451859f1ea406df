"""The alerts are well-formed, each tested by promtool in both directions, each with its runbook."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from observe import alert_rules
from services.router.request.router_metrics import RouterMetrics

REPOSITORY = Path(__file__).parents[2]
CASES = sorted(Path(__file__).parent.glob("*.yaml"))
RUNBOOKS = REPOSITORY / "docs/runbooks.md"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


def alerts(**values):
    return [rule for rule in alert_rules.rules(**values) if "alert" in rule]


def anchors():
    """Return the headings' anchors as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_an_alert_says_how_bad_what_where_and_where_to_read_on(subtests):
    for rule in alerts():
        with subtests.test(rule["alert"]):
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
            page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            assert page == alert_rules.RUNBOOKS and anchor in anchors()
            assert rule["for"], "one bad scrape must not wake anybody"
            # Two installations may have chosen one name for us.
            for labels in re.findall(r"\b(?:by|on) \(([^)]+)\)", rule["expr"]):
                names = labels.split(", ")
                assert ("cluster" in names) == ("isthmus_cluster" in names), labels
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in alerts(runbooks=""))


def test_each_alert_has_a_case_that_fires_and_one_that_is_silent():
    tests = [test for path in CASES for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == silent == {rule["alert"] for rule in alerts()}


def test_goals_are_values_and_edges_of_the_histograms():
    goals = {"ttftSeconds": 5, "ttftShare": 0.99, "successShare": 0.9999, "ranksDownShare": 0.5}
    text = str(alert_rules.rules(goals=goals))
    assert all(word in text for word in ('le="5.0"', "(1 - 0.99)", "(1 - 0.9999)", "> 0.5", "within 5.0 s"))
    assert "2.5" not in text and "@" not in text

    schema = json.loads((alert_rules.CHART / "values.schema.json").read_text())
    goals = schema["properties"]["monitoring"]["properties"]["goals"]["properties"]
    registry = CollectorRegistry()
    RouterMetrics(registry)
    edges = {
        (sample.name, float(sample.labels["le"]))
        for family in registry.collect()
        for sample in family.samples
        if "le" in sample.labels
    }
    for name in ("isthmus_ttft_seconds_bucket", "isthmus_abandoned_seconds_bucket"):
        assert {(name, float(edge)) for edge in goals["ttftSeconds"]["enum"]} <= edges


@pytest.fixture
def rules(tmp_path):
    """Write the rendered files, with the cases beside them."""
    (tmp_path / "rules").mkdir()
    for path in CASES:
        (tmp_path / path.name).write_text(path.read_text())
    alert_rules.write(tmp_path / "rules")
    return tmp_path


@pytest.mark.observe
@pytest.mark.timeout(600)  # promtool computes days, minute by minute
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_promtool_agrees(rules, cases):
    assert PROMTOOL, "make observe-check installs promtool; or set PROMTOOL"
    for arguments in (["check", "rules", *(rules / "rules").iterdir()], ["test", "rules", cases.name]):
        run = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, cwd=rules)
        assert run.returncode == 0, run.stdout + run.stderr
