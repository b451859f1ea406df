"""These tests show what a panel's expression comes to, asked of promtool with series that are made up."""

import os
import shutil
import subprocess

import pytest
import yaml

from observe.boards import PANELS, filled_in

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


def rank(metric, number, values):
    labels = f'isthmus_cluster="c",role="decode",worker="d",rank="{number}"'
    return {"series": f"{metric}{{{labels}}}", "values": values}


@pytest.mark.observe
@pytest.mark.parametrize(("busy", "spread"), [([600], 4), ([600, 600], 2), ([600, 600, 600, 600], 1)])
def test_how_evenly_prompts_are_spread_counts_ranks_that_get_none(tmp_path, busy, spread):
    """Four ranks are up and one is down; those that nothing was ever sent to have no series of tokens."""
    (panel,) = [panel for panel in PANELS if panel.title == "Load imbalance by role"]
    placed = [
        rank("isthmus_placed_prompt_tokens_total", i, f"0+{tokens}x30") for i, tokens in enumerate(busy)
    ]
    up = [rank("isthmus_rank_up", i, f"{int(i < 4)}x30") for i in range(5)]
    asked = {
        "expr": filled_in(panel.targets[0]["expr"], "5m"),
        "eval_time": "20m",
        "exp_samples": [{"labels": '{role="decode"}', "value": spread}],
    }
    test = {"interval": "1m", "input_series": placed + up, "promql_expr_test": [asked]}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    assert PROMTOOL, "make observe-check installs promtool; or set PROMTOOL"
    run = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
