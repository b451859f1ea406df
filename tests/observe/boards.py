"""The dashboards and alerts as they are committed, and the expressions in them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from observe import alert_rules

REPOSITORY = Path(__file__).parents[2]
BOARDS = {
    p.stem: json.loads(p.read_text()) for p in sorted(REPOSITORY.glob("charts/isthmus/dashboards/*.json"))
}
RULES = alert_rules.rules()
ALERTS = [rule for rule in RULES if "alert" in rule]
_NAME = r"(?!isthmus_cluster\b)(?:isthmus|process)_[a-z_]+"  # that one is a label
_METRIC = re.compile(rf"\b{_NAME}\b")
_SELECTOR = re.compile(rf"\b(?:{_NAME}|up)\b(?:\{{[^}}]*\}})?")


@dataclass(frozen=True)
class Panel:
    board: str
    json: dict

    @property
    def title(self):
        return self.json["title"]

    @property
    def targets(self):
        return self.json["targets"]

    def __str__(self):
        return f"{self.board}: {self.title}"


PANELS = [
    Panel(name, panel)
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]


def filled_in(expr, interval="20s"):
    """As Grafana sends it when all variables say All."""
    for name in ("isthmus_cluster", "cluster", "role", "worker", "rank"):
        expr = expr.replace(f"${name}", ".*")
    return expr.replace("$__rate_interval", interval)


def metrics_in(expr):
    return set(_METRIC.findall(expr))


def selectors_in(expr):
    return sorted(set(_SELECTOR.findall(expr)))
