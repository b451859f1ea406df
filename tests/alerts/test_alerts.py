"""The alerts: well-formed, each tested by promtool in both directions, each with its runbook."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
RULES = sorted((REPOSITORY / "charts/isthmus/alerts").glob("*.yaml"))
CASES = Path(__file__).parent / "isthmus.yaml"
RUNBOOKS = REPOSITORY / "docs/runbooks.md"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


def alerts():
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def anchors():
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_what_and_where_to_read_on(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (REPOSITORY / page) == RUNBOOKS and anchor in anchors()
    assert rule["for"], "one bad scrape must not wake anybody"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_of_a_cluster_is_of_one_that_prometheus_knows_by_another_name_too(rule):
    """Two installations may have chosen one name for us."""
    for labels in re.findall(r"\b(?:by|on) \(([^)]+)\)", rule["expr"]):
        names = labels.split(", ")
        assert ("cluster" in names) == ("isthmus_cluster" in names), labels


def test_each_alert_has_a_case_that_fires_and_one_that_is_silent():
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == silent == {rule["alert"] for rule in alerts()}


@pytest.mark.observe
@pytest.mark.parametrize(
    "arguments", [("check", "rules", *RULES), ("test", "rules", CASES)], ids=["check", "test"]
)
def test_promtool_agrees(arguments):
    assert PROMTOOL, "make observe-check installs promtool; or set PROMTOOL"
    run = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
