"""Every dashboard against Grafana's own types, and every expression against a parser of PromQL."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from observe.boards import ALERTS, BOARDS, PANELS, REPOSITORY, filled_in

TOOLS = Path(os.environ.get("OBSERVE_TOOLS", REPOSITORY / ".cache/observe"))
PYTHON = Path(os.environ.get("OBSERVE_PYTHON", REPOSITORY / ".venv-observe/bin/python"))

pytestmark = pytest.mark.observe

_HEAD = """\
import type { Dashboard, DataQuery, DataSourceRef, Panel, RowPanel } from "@grafana/schema";
import type {
  FieldConfig,
  Options as GraphOptions,
} from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type {
  Options as TileOptions,
} from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";

// JSON has no enums: their values stand for them.
type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Target = Omit<Plain<DataQuery>, "datasource"> & {
  datasource: DataSourceRef;
  expr: string;
  legendFormat?: string;
  exemplar?: boolean;
};
type Typed<Kind extends string, Options, Custom> = Omit<
  Plain<Panel>, "type" | "options" | "targets" | "fieldConfig"
> & {
  type: Kind;
  options: Plain<Options>;
  targets: Target[];
  fieldConfig: {
    defaults: Omit<NonNullable<Plain<Panel>["fieldConfig"]>["defaults"], "custom"> & {
      custom?: Plain<Custom>;
    };
    overrides: NonNullable<Plain<Panel>["fieldConfig"]>["overrides"];
  };
};
type Ours =
  | Typed<"timeseries", GraphOptions, FieldConfig>
  | Typed<"stat", TileOptions, Record<string, never>>
  | Plain<RowPanel>;
type Board = Omit<Plain<Dashboard>, "panels"> & { panels: Ours[] };
"""


def compile_errors(folder, boards):
    sources = []
    for name, board in boards.items():
        source = folder / f"{name}.ts"
        source.write_text(f"{_HEAD}export const board: Board = {json.dumps(board, indent=1)};\n")
        sources.append(str(source))
    modules = TOOLS / "node_modules"
    (folder / "node_modules").symlink_to(modules)
    options = ["--strict", "--noEmit", "--skipLibCheck", "--target", "es2022"]
    options += ["--module", "esnext", "--moduleResolution", "bundler"]
    run = subprocess.run(
        [modules / ".bin/tsc", *options, *sources], capture_output=True, text=True, cwd=folder
    )
    return run.stdout + run.stderr


def test_the_dashboards_are_what_grafana_reads(tmp_path):
    assert compile_errors(tmp_path, BOARDS) == ""


def test_the_compiler_would_notice(tmp_path):
    broken = json.loads(json.dumps(BOARDS["overview"]))
    graph = next(panel for panel in broken["panels"] if panel["type"] == "timeseries")
    graph["options"]["legend"]["placement"] = "left"
    errors = compile_errors(tmp_path, {"overview": broken})
    assert "'\"left\"' is not assignable" in errors, errors


def test_the_committed_dashboards_are_the_generated_ones():
    run = subprocess.run(
        [PYTHON, REPOSITORY / "charts/observe/generate.py", "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_every_expression_parses():
    expressions = [filled_in(target["expr"]) for panel in PANELS for target in panel.targets]
    expressions += [rule["expr"] for rule in ALERTS]
    program = "import json, sys, promql_parser\nfor e in json.load(sys.stdin): promql_parser.parse(e)"
    run = subprocess.run(
        [PYTHON, "-c", program], input=json.dumps(expressions), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
