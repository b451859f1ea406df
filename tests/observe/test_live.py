"""Every expression of the dashboards and alerts, asked of a Prometheus that watched a cluster under load."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from observe.boards import BOARDS, PANELS, REPOSITORY, RULES, filled_in, selectors_in
from observe.prometheus import KUBERNETES, SCRAPE_S

pytestmark = [pytest.mark.observe, pytest.mark.timeout(900)]

ANSWERS = Path(os.environ.get("OBSERVE_ANSWERS", REPOSITORY / ".cache/observe/answers"))
# Expressions that may return nothing, and why. Empty: all return something.
EXCEPTIONS: dict[str, str] = {}
# What alerts look at that this cluster has not, and why.
NOT_HERE = {
    "isthmus_tls_not_before_seconds": "no TLS",
    "isthmus_tls_not_after_seconds": "no TLS",
    'isthmus_kv_path{kind="tcp"}': "KV crosses by shared memory",
    'isthmus_tier_reads_total{end="corrupt"}': "no tiers",
}


def series_of(watched, panel):
    """What Grafana would draw: a name and points for each series of each target, in order."""
    drawn = []
    for target in panel.targets:
        expr = filled_in(target["expr"], f"{10 * SCRAPE_S}s")
        for found in watched.prometheus.over(expr, watched.start_s, watched.end_s, SCRAPE_S):
            points = [(float(at), float(value)) for at, value in found["values"]]
            values = [(at, None if math.isnan(value) else value) for at, value in points]
            drawn.append({"name": named(target.get("legendFormat", ""), found["metric"]), "values": values})
    return drawn


def named(template, labels):
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), template).strip()


@pytest.mark.parametrize("panel", PANELS, ids=str)
def test_a_panel_shows_something(watched, panel):
    for target in panel.targets:
        expr = filled_in(target["expr"], f"{10 * SCRAPE_S}s")
        found = watched.prometheus.over(expr, watched.start_s, watched.end_s, SCRAPE_S)
        values = [float(value) for series in found for _, value in series["values"]]
        assert str(panel) in EXCEPTIONS or any(math.isfinite(value) for value in values), expr
    names = [series["name"] for series in series_of(watched, panel)]
    assert len(set(names)) == len(names), names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_an_alert_is_fed(watched, rule):
    """It is an expression that Prometheus takes, and everything it looks at is there."""
    watched.prometheus.now(rule["expr"], watched.end_s)
    for selector in selectors_in(rule["expr"]):
        # A counter of failures begins with the first one; users of this cluster meet none.
        selector = re.sub(r"\{outcome!~.*", "", selector)
        found = watched.prometheus.now(selector, watched.end_s)
        assert bool(found) == (selector not in NOT_HERE), selector


def test_prometheus_runs_the_alerts(watched):
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule.get("alert") or rule["record"] for rule in RULES}
    assert [rule.get("lastError", "") for rule in rules] == [""] * len(rules)


def test_the_variables_have_values(watched):
    for label, least in (("cluster", 1), ("isthmus_cluster", 1), ("role", 2), ("worker", 3), ("rank", 2)):
        found = watched.prometheus.ask(f"label/{label}/values", **{"match[]": "isthmus_rank_up"})
        assert len(found) >= least, (label, found)


def test_what_the_installation_calls_its_cluster_is_left_as_it_is(watched):
    found = watched.prometheus.now('count by (cluster) ({__name__=~"isthmus_.+"})', watched.end_s)
    assert [series["metric"] for series in found] == [{"cluster": KUBERNETES}]


def test_the_load_was_served_and_seen(watched):
    (finished,) = watched.prometheus.now(
        'sum(max_over_time(isthmus_requests_total{outcome="finished"}[1h]))', watched.end_s
    )
    # A turn that ended between two scrapes of the last seconds may be missing.
    assert watched.turns * 0.8 <= float(finished["value"][1]) and watched.turns > 10


def test_an_exemplar_leads_to_a_trace(watched):
    found = watched.prometheus.ask(
        "query_exemplars", query="isthmus_ttft_seconds_bucket", start=watched.start_s, end=watched.end_s
    )
    named_traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert named_traces and named_traces <= watched.trace_ids


def test_the_answers_are_kept_for_the_screenshots(watched):
    ANSWERS.mkdir(parents=True, exist_ok=True)
    for name, board in BOARDS.items():
        panels = {panel.json["id"]: series_of(watched, panel) for panel in PANELS if panel.board == name}
        answer = {"dashboard": board, "from": watched.start_s, "to": watched.end_s, "panels": panels}
        (ANSWERS / f"{name}.json").write_text(json.dumps(answer))
        assert len(panels) > 5
