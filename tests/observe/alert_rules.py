"""The chart's rules as Prometheus gets them: as templates/monitoring.yaml replaces what stands between @."""

import re
from pathlib import Path

import yaml

CHART = Path(__file__).parents[2] / "charts/isthmus"
RUNBOOKS = "https://wiki.example.com/runbooks"


def rendered(path, goals=None, runbooks=RUNBOOKS):
    """The text of a file of rules, with the chart's default goals unless others are given."""
    goals = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["goals"] | (goals or {})
    words = {
        "TTFT_SECONDS": str(float(goals["ttftSeconds"])),
        "TTFT_SHARE": str(goals["ttftShare"]),
        "SUCCESS_SHARE": str(goals["successShare"]),
        "RANKS_DOWN_SHARE": str(goals["ranksDownShare"]),
        "RUNBOOKS": runbooks,
    }
    text = path.read_text()
    if not runbooks:
        text = re.sub(r"(?m)^ *runbook_url:.*\n", "", text)
    return re.sub(r"@([A-Z_]+)@", lambda match: words[match[1]], text)


def rules(**values):
    """Of all files, recording rules and alerts."""
    return [
        rule
        for path in sorted((CHART / "alerts").glob("*.yaml"))
        for group in yaml.safe_load(rendered(path, **values))["groups"]
        for rule in group["rules"]
    ]


def write(folder):
    """The files, rendered, into `folder`; where they are."""
    paths = []
    for path in sorted((CHART / "alerts").glob("*.yaml")):
        paths.append(folder / path.name)
        paths[-1].write_text(rendered(path))
    return paths
