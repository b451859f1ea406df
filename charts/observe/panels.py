"""The few kinds of panel that our dashboards are made of, and the dashboards' frame."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models.dashboard import DataSourceRef, Panel

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# `cluster` is what the installation's own Prometheus may name the Kubernetes cluster by; where it does not, All it is.
CLUSTER = 'cluster=~"$cluster", isthmus_cluster=~"$isthmus_cluster"'
_ROLE, _WORKER = f'{CLUSTER}, role=~"$role"', f'{CLUSTER}, role=~"$role", worker=~"$worker"'
RANK = f'{_WORKER}, rank=~"$rank"'
_WIDTH, _HEIGHT, _TILE_HEIGHT = 24, 8, 4


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` is Prometheus's template: {{label}}."""

    expr: str
    legend: str = ""


def graph(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    stacked: bool = False,
    maximum: float | None = None,
    exemplars: bool = False,
) -> timeseries.Panel:
    """Lines over time; `stacked`: areas that add up. `exemplars` of the histograms lead to traces."""
    panel = (
        timeseries.Panel()
        .title(title)
        .unit(unit)
        .description(description)
        .datasource(SOURCE)
        .height(_HEIGHT)
        .span(_WIDTH // 2)
        .min(0)
        .line_width(1 if stacked else 2)
        .fill_opacity(60 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if maximum is not None:
        panel.max(maximum)
    return _with_targets(panel, queries, exemplars)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a tile turns yellow and red; `low`: when the value falls to it."""

    yellow: float
    red: float
    low: bool = False

    def thresholds(self) -> dashboard.ThresholdsConfig:
        if self.low:
            return _thresholds([("red", None), ("yellow", self.red), ("green", self.yellow)])
        return _thresholds([("green", None), ("yellow", self.yellow), ("red", self.red)])


def _thresholds(steps: Sequence[tuple[str, float | None]]) -> dashboard.ThresholdsConfig:
    made = [dashboard_models.Threshold(value=value, color=color) for color, value in steps]
    return dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(made)


def tile(
    title: str, unit: str, description: str, expr: str, limits: Limits | None = None, span: int = 4
) -> stat.Panel:
    """One number, green, yellow or red, over its recent course."""
    panel = (
        stat.Panel()
        .title(title)
        .unit(unit)
        .description(description)
        .datasource(SOURCE)
        .height(_TILE_HEIGHT)
        .span(span)
        .color_mode(
            common_models.BigValueColorMode.BACKGROUND_SOLID
            if limits
            else common_models.BigValueColorMode.VALUE
        )
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    panel.thresholds(limits.thresholds() if limits else _thresholds([("blue", None)]))
    return _with_targets(panel, [Query(expr)])


def board(
    uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Builder[Panel]]]]
) -> dashboard_models.Dashboard:
    """A dashboard of titled rows."""
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["isthmus"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(dashboard_models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Isthmus")
            .type(dashboard_models.DashboardLinkType.DASHBOARDS)
            .tags(["isthmus"])
            .as_dropdown(False)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, known in (
        ("cluster", ""),
        ("isthmus_cluster", 'cluster=~"$cluster"'),
        ("role", CLUSTER),
        ("worker", _ROLE),
        ("rank", _WORKER),
    ):
        builder.with_variable(_variable(name, known))
    numbers = count(1)
    for row_title, panels in rows:
        builder.with_row(dashboard.Row(row_title).id(next(numbers)))
        for panel in panels:
            builder.with_panel(panel.id(next(numbers)))  # type: ignore[attr-defined]
    return _current(builder.build())


def _current(made: dashboard_models.Dashboard) -> dashboard_models.Dashboard:
    """Without what the SDK writes for every variable and Grafana's schema has for none."""
    assert made.templating is not None
    for variable in made.templating.list_val or ():
        variable.auto = variable.auto_count = variable.auto_min = None
    return made


def _variable(name: str, known: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.replace("_", " ").capitalize())
        .datasource(SOURCE)
        .query(f"label_values(isthmus_rank_up{{{known}}}, {name})")
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _with_targets(panel, queries, exemplars=False):  # type: ignore[no-untyped-def]  # the SDK's panels share no type
    for ref_id, query in zip("ABCDEFGH", queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(ref_id).datasource(SOURCE)
        if query.legend:
            target.legend_format(query.legend)
        if exemplars:
            target.exemplar(True)
        panel.with_target(target)
    return panel
