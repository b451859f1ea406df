"""The few kinds of panel that our dashboards are made of, and the dashboards' frame."""

from collections.abc import Mapping, Sequence
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
_AXIS_WIDTH = 76  # pixels: "0.35 req/s" in full
# Grounds on which digits are white, whatever the theme.
_FINE, _ODD, _WRONG = "#22252b", "#8a5a00", "#8f1d2c"


BY_RANK, NAME = "role, worker, rank", "{{role}} {{worker}}/{{rank}}"
_RATE = "[$__rate_interval]"


def rate(metric: str, by: str = "", selector: str = CLUSTER, function: str = "rate") -> str:
    return f"sum{f' by ({by}) ' if by else ''}({function}({metric}{{{selector}}}{_RATE}))"


def quantile(share: float, metric: str, by: str = "", selector: str = CLUSTER) -> str:
    buckets = rate(f"{metric}_bucket", f"le, {by}" if by else "le", selector)
    return f"histogram_quantile({share}, {buckets})"


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` is Prometheus's template: {{label}}."""

    expr: str
    legend: str = ""
    shown: str = ""  # of many series these alone


def quantiles(metric: str, *percents: int) -> list[Query]:
    """One line for each: p50, p95."""
    return [Query(quantile(percent / 100, metric), f"p{percent}") for percent in percents]


_SHOWN = 10  # series of one query in a graph by rank: a legend of 64 is not read


def highest(expr: str, legend: str) -> Query:
    """The ranks of which most is to be seen."""
    return Query(f"topk({_SHOWN}, {expr})", legend, "highest")


def lowest(expr: str, legend: str) -> Query:
    """The ranks of which least is to be seen, where that is what is wrong."""
    return Query(f"bottomk({_SHOWN}, {expr})", legend, "lowest")


def graph(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    stacked: bool = False,
    maximum: float | None = None,
    exemplars: bool = False,
    colors: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """Lines over time, from zero, with their last and highest value in the legend.

    `stacked`: areas that add up. `exemplars` of the histograms lead to traces. `colors` are by legend.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .unit(unit)
        .description(description + _of_many(queries))
        .datasource(SOURCE)
        .height(_HEIGHT)
        .span(_WIDTH // 2)
        .min(0)
        .axis_width(_AXIS_WIDTH)
        .line_width(1 if stacked else 2)
        .fill_opacity(60 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.RIGHT)
            .calcs(["lastNotNull", "max"])
            .sort_by("Max")
            .sort_desc(True)
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
    for legend, color in (colors or {}).items():
        panel.override_by_name(legend, [_colored(color)])
    return _with_targets(panel, queries, exemplars)


def _of_many(queries: Sequence[Query]) -> str:
    shown = next((query.shown for query in queries if query.shown), "")
    return f" Shown are the {_SHOWN} {shown}." if shown else ""


def _colored(color: str) -> dashboard_models.DynamicConfigValue:
    return dashboard_models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a tile's ground turns amber and red; `low`: when the value falls to it."""

    amber: float
    red: float
    low: bool = False

    def thresholds(self) -> dashboard.ThresholdsConfig:
        if self.low:
            return _thresholds([(_WRONG, None), (_ODD, self.red), (_FINE, self.amber)])
        return _thresholds([(_FINE, None), (_ODD, self.amber), (_WRONG, self.red)])


def _thresholds(steps: Sequence[tuple[str, float | None]]) -> dashboard.ThresholdsConfig:
    made = [dashboard_models.Threshold(value=value, color=color) for color, value in steps]
    return dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(made)


def tile(title: str, unit: str, description: str, expr: str, limits: Limits | None = None) -> stat.Panel:
    """One number, in white on a plain ground: dark, amber or red."""
    panel = (
        stat.Panel()
        .title(title)
        .unit(unit)
        .description(description)
        .datasource(SOURCE)
        .height(_TILE_HEIGHT)
        .span(4)
        .color_mode(common_models.BigValueColorMode.BACKGROUND_SOLID)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    panel.thresholds(limits.thresholds() if limits else _thresholds([(_FINE, None)]))
    return _with_targets(panel, [Query(expr)])


def board(
    uid: str, title: str, description: str, rows: Mapping[str, Sequence[Builder[Panel]]]
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
    for row_title, panels in rows.items():
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
