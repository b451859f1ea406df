"""These pure functions draw the cluster as lines of a terminal.

Columns fit the terminal: bars take the space that is left, and names are shortened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from services.cli.look.cluster_picture import (
    Picture,
    RankName,
    came_to_decode,
    found_at_decode,
    name_of,
)
from services.cli.table import format_bytes, format_rank, format_reason
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import FinishedRequest, RankStatus, RunningRequest

_GAP, _LEAST_BAR = 2, 8
_HEADING = "dim"


@dataclass(frozen=True, slots=True)
class Glyphs:
    full: str
    half: str
    rest: str
    more: str


BLOCKS, ASCII = Glyphs("█", "▒", "░", "…"), Glyphs("#", "=", ".", "~")


@dataclass(frozen=True, slots=True)
class Bar:
    full: int
    half: int
    whole: int
    styles: tuple[str, str, str] = ("green", "yellow", "dim")

    def drawn(self, width: int, glyphs: Glyphs) -> Text:
        if not self.whole:
            return Text(" " * width)
        # A part that is not 0 gets at least one cell.
        full = _cells(self.full, self.whole, width)
        half = min(_cells(self.half, self.whole, width), width - full)
        if self.half and not half:
            full, half = full - 1, 1
        text = Text()
        parts = zip((full, half, width - full - half), (glyphs.full, glyphs.half, glyphs.rest), strict=True)
        for (cells, glyph), style in zip(parts, self.styles, strict=True):
            text.append(glyph * cells, style)
        return text


Cell = str | Text | Bar


@dataclass(frozen=True, slots=True)
class Column:
    """A column with `spare` above 0 is left out if the others do not fit beside it; the highest `spare` goes
    first.

    It may shrink to `least` columns, cut in the middle; None keeps its width.
    """

    heading: str
    right: bool = False
    spare: int = 0
    least: int | None = None
    most: int = 40  # A bar is at most this wide.


_Table = list[tuple[Column, list[Cell]]]  # Each item is a column with its cells.


def grid(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, glyphs: Glyphs) -> list[Text]:
    """Return a line of headings and one line for each row, none longer than `width`.

    A spare column is shown only if one of its cells is filled.
    """
    table = [(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
    table = [(column, cells) for column, cells in table if not column.spare or any(map(_is_filled, cells))]
    while (widths := _widths(table, width)) is None:
        spare = max(table, key=lambda shown: shown[0].spare)
        if not spare[0].spare:
            widths = [_natural(*shown) for shown in table]
            break
        table.remove(spare)
    return [_line(table, number, widths, glyphs, width) for number in range(-1, len(rows))]


def _is_filled(cell: Cell) -> bool:
    return isinstance(cell, Bar) or bool(cell)


def _widths(table: _Table, width: int) -> list[int] | None:
    widths = [_natural(column, cells) for column, cells in table]
    left = width - sum(widths) - _GAP * (len(table) - 1)
    for i, (column, _) in enumerate(table):
        if left < 0 and column.least is not None:
            given = min(-left, max(0, widths[i] - column.least))
            widths[i], left = widths[i] - given, left + given
    if left < 0:
        return None
    for i, (column, cells) in enumerate(table):
        if any(isinstance(cell, Bar) for cell in cells):
            given = max(0, min(left, column.most - widths[i]))
            widths[i], left = widths[i] + given, left - given
    return widths


def _natural(column: Column, cells: Sequence[Cell]) -> int:
    lengths = [_LEAST_BAR if isinstance(cell, Bar) else len(cell) for cell in cells]
    return max([len(column.heading), *lengths])


def _line(table: _Table, number: int, widths: Sequence[int], glyphs: Glyphs, width: int) -> Text:
    line = Text(no_wrap=True)
    for i, ((column, cells), cell_width) in enumerate(zip(table, widths, strict=True)):
        cell = Text(column.heading, _HEADING) if number < 0 else cells[number]
        drawn = (
            cell.drawn(cell_width, glyphs) if isinstance(cell, Bar) else _cut(cell, cell_width, glyphs.more)
        )
        drawn.align("right" if column.right else "left", cell_width)
        line.append(" " * _GAP if i else "")
        line.append(drawn)
    line.truncate(width)
    line.rstrip()
    return line


def _cut(cell: str | Text, width: int, more: str) -> Text:
    """Cut the text in the middle: the names of pods begin alike, and a rank's number is at the end."""
    text = Text(cell) if isinstance(cell, str) else cell.copy()
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    head = width - 1 - tail
    return text[:head] + Text(more) + (text[-tail:] if tail else Text())


def _cells(part: int, whole: int, width: int) -> int:
    return min(width, max(1, round(width * part / whole))) if part else 0


_RANKS = (
    Column("rank", least=12),
    Column("role"),
    Column("state", least=8),
    Column("pool", most=30),
    Column("used", right=True),
    Column("run", right=True),
    Column("wait", right=True),
    Column("found", right=True),
    Column("tok/s", right=True, spare=2),
    Column("trust", right=True, spare=1),
)
_RUNNING = (
    Column("running", least=10),
    Column("tenant", least=8, spare=2),
    Column("conversation", least=8, spare=1),
    Column("decode", least=10),
    Column("prefill", least=10),
    Column("age", right=True),
    Column("prompt", right=True),
    Column("out", right=True),
)
_FINISHED = (
    Column("finished", least=8),
    Column("tenant", least=8, spare=3),
    Column("ago", right=True, spare=2),
    Column("decode", least=9),
    Column("found/moved", most=24),
    Column("prompt", right=True),
    Column("found", right=True),
    Column("pulled", right=True, spare=1),
    Column("KV moved", right=True),
    Column("TTFT", right=True),
    Column("out", right=True),
    Column("end", least=7),
)
_POOL_STYLES = ("green", "yellow", "dim")
_BAD, _WARN, _STRONG, _DIM = "red", "yellow", "bold", "dim"
_STATE_STYLES = {"live": "green", "suspect": _WARN, "draining": "cyan"}
_FAILURES = {
    "RESOURCE_EXHAUSTED": "no room",
    "UNAVAILABLE": "no rank",
    "DEADLINE_EXCEEDED": "too late",
    "INVALID_ARGUMENT": "refused",
    "INTERNAL": "error",
}
_LEAST_LINES = 3  # A table keeps this many if there is little room.
_BEHIND_S = 1.0  # A healthy index is less far behind than this.


def draw(
    picture: Picture,
    now: float,
    width: int,
    height: int | None = None,
    *,
    title: str = "",
    hint: str = "",
    most_finished: int | None = None,
    glyphs: Glyphs = BLOCKS,
) -> Text:
    """Draw the picture in `height` lines, or in as many as it needs (None), for a router and a tenant."""
    finished = picture.finished(now)[:most_finished]
    head = [*_head(picture, now, title, width), Text()]
    running = picture.running(now)
    tables = [
        grid(_RANKS, _rank_rows(picture, now), width, glyphs)
        if picture.ranks
        else [Text("no rank is registered", _WARN)],
        grid(_RUNNING, [_running_row(*each) for each in running], width, glyphs) if running else [],
        grid(_FINISHED, [_finished_row(*each) for each in finished], width, glyphs) if finished else [],
    ]
    foot = [Text(), *_legend(glyphs, hint, width)]
    if height is not None:
        tables = _fitted(tables, height - len(head) - len(foot))
    shown = [table for table in tables if table]
    lines = [line for table in shown for line in (Text(), *table)][1:]
    return Text("\n", no_wrap=True).join([*head, *lines, *foot][:height])


def _fitted(tables: list[list[Text]], height: int) -> list[list[Text]]:
    ranks, running, finished = tables
    ranks = _first(ranks, height - _reserved(running) - _reserved(finished), "ranks")
    left = height - len(ranks)
    running = _first(running, left - 1 - _reserved(finished), "requests that run")
    left -= len(running) + 1 if running else 0
    return [ranks, running, finished[: max(0, left - 1)]]


def _reserved(table: list[Text]) -> int:
    return 1 + min(len(table), _LEAST_LINES) if table else 0


def _first(lines: list[Text], most: int, of: str) -> list[Text]:
    if len(lines) <= most:
        return lines
    kept = max(1, most - 1)
    return [*lines[:kept], Text(f"and {len(lines) - kept} more {of}", _DIM)]


def _head(picture: Picture, now: float, title: str, width: int) -> Iterator[Text]:
    roles = [rank.role for rank in picture.ranks]
    ranks = ", ".join(
        f"{count} {name}"
        for name, count in (
            ("prefill", roles.count(common_pb2.ROLE_PREFILL)),
            ("decode", roles.count(common_pb2.ROLE_DECODE)),
        )
    )
    yield _joined([Text("isthmus top", _STRONG), Text(title), Text(f"{ranks} ranks")], width)
    totals, last = picture.window.totals(now), picture.last
    parts = [f"last {picture.window.window_s:g} s", f"{totals.requests_per_s:.1f} requests/s"]
    if totals.hit_rate is not None:
        parts.append(f"{totals.hit_rate:.0%} found")
    if totals.ttft_p50_s is not None and totals.ttft_p99_s is not None:
        parts.append(f"TTFT p50 {_time(totals.ttft_p50_s)}, p99 {_time(totals.ttft_p99_s)}")
    failed = [Text(f"{totals.failed} failed", _BAD)] if totals.failed else []
    yield _joined([*map(Text, parts), *failed, Text(f"{last.num_running} run")], width)
    if picture.away:
        yield Text(picture.away, _BAD)
    if last.degraded:
        yield Text(f"degraded: {last.degraded}", _WARN)
    if last.staleness_s >= _BEHIND_S:
        yield Text(f"the index is {last.staleness_s:.1f} s behind the ranks", _WARN)
    if last.dropped:
        yield Text(f"{last.dropped} finished requests were not reported: this reads too slowly", _WARN)


def _joined(parts: Sequence[Text], width: int) -> Text:
    line = Text()
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            break
        line.append("  " if line else "")
        line.append(part)
    return line


def _legend(glyphs: Glyphs, hint: str, width: int) -> Iterator[Text]:
    pool = f"pool {glyphs.full} used {glyphs.half} cached {glyphs.rest} free"
    prompt = f"prompt {glyphs.full} found {glyphs.half} moved {glyphs.rest} computed"
    yield _joined([Text(part, _DIM) for part in (pool, prompt, hint) if part], width)


def _rank_rows(picture: Picture, now: float) -> list[list[Cell]]:
    rates = picture.window.hit_rates(now)
    return [_rank_row(rank, rates) for rank in picture.ranks]


def _rank_row(rank: RankStatus, rates: dict[RankName, float]) -> list[Cell]:
    load, state = rank.load, rank.excluded or rank.state
    used = load.used_pages + load.quarantined_pages
    rate = rates.get(name_of(rank.rank))
    return [
        format_rank(rank.rank),
        common_pb2.Role.Name(rank.role).removeprefix("ROLE_").lower(),
        Text(state, _STATE_STYLES.get(state, _BAD)),
        Bar(used, load.cached_pages, load.total_pages, _POOL_STYLES),
        f"{used / load.total_pages:.0%}" if load.total_pages else "",
        str(load.running),
        Text(str(load.waiting), _WARN if load.waiting else ""),
        "" if rate is None else f"{rate:.0%}",
        _tokens_per_s(rank),
        f"{rank.trust:.2f}",
    ]


def _tokens_per_s(rank: RankStatus) -> str:
    load = rank.load
    if rank.role == common_pb2.ROLE_PREFILL:
        rate = load.prefill_tokens_per_s
    else:
        rate = load.tokens_per_step * load.running / load.step_s if load.step_s else 0.0
    return f"{rate:.0f}" if rate else ""


def _running_row(age_s: float, request: RunningRequest) -> list[Cell]:
    return [
        request.request_id,
        request.tenant,
        request.conversation_id,
        format_rank(request.decode) if request.HasField("decode") else Text("waits", _WARN),
        format_rank(request.prefill) if request.HasField("prefill") else "",
        _time(age_s),
        str(request.prompt_tokens),
        str(request.completion_tokens),
    ]


def _finished_row(ago_s: float, request: FinishedRequest) -> list[Cell]:
    finish, usage = request.finish, request.finish.usage
    first_s, found = finish.stages.first_token_s, found_at_decode(finish)
    return [
        request.request_id,
        request.tenant,
        _time(ago_s),
        format_rank(finish.placement.decode) if finish.HasField("placement") else "",
        Bar(found, came_to_decode(finish), usage.prompt_tokens),
        str(usage.prompt_tokens or ""),
        f"{found / usage.prompt_tokens:.0%}" if usage.prompt_tokens else "",
        str(usage.pulled_tokens or ""),
        format_bytes(moved) if (moved := usage.kv_bytes_moved + usage.pulled_bytes) else "",
        _time(first_s) if first_s else "",
        str(request.completion_tokens or ""),
        _end(request),
    ]


def _end(request: FinishedRequest) -> Text:
    if request.outcome != "ok":
        name = _FAILURES.get(request.outcome, request.outcome.lower())
        return Text(name, _WARN if name == "aborted" else _BAD)
    return Text(format_reason(request.finish))


def _time(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_970 else f"{seconds / 3_600:.1f} h"
