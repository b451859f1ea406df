"""These pure functions draw the cluster as lines of a terminal."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from services.cli.table import format_bytes
from services.cli.top.grid import BLOCKS, Bar, Cell, Column, Glyphs, grid
from services.cli.top.picture import Picture
from services.cli.top.recent_requests import RankName, name_of
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import FinishedRequest, RankStatus, RunningRequest

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
_LEAST_LINES = 3  # A table has so many, where there is little room.
_BEHIND_S = 1.0  # An index is not usually behind by that much.


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
    """Draw the picture in `height` lines, or in as many as it takes (None). `title` says who is watched, of
    whom.
    """
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
    """Show something of all three tables, and of ranks the most; where some are left out it says how many."""
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
    totals = picture.totals(now)
    parts = [f"last {picture.window_s:g} s", f"{totals.requests_per_s:.1f} requests/s"]
    if totals.hit_rate is not None:
        parts.append(f"{totals.hit_rate:.0%} found")
    if totals.ttft_p50_s is not None and totals.ttft_p99_s is not None:
        parts.append(f"TTFT p50 {_time(totals.ttft_p50_s)}, p99 {_time(totals.ttft_p99_s)}")
    failed = [Text(f"{totals.failed} failed", _BAD)] if totals.failed else []
    yield _joined([*map(Text, parts), *failed, Text(f"{picture.num_running} run")], width)
    if picture.away:
        yield Text(picture.away, _BAD)
    if picture.degraded:
        yield Text(f"degraded: {picture.degraded}", _WARN)
    if picture.staleness_s >= _BEHIND_S:
        yield Text(f"the index is {picture.staleness_s:.1f} s behind the ranks", _WARN)
    if picture.dropped:
        yield Text(f"{picture.dropped} finished requests were not told: this reads too slowly", _WARN)


def _joined(parts: Sequence[Text], width: int) -> Text:
    """Join the parts in a line, without the last of those that it does not hold."""
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
    rates = picture.hit_rates(now)
    return [_rank_row(rank, rates) for rank in picture.ranks]


def _rank_row(rank: RankStatus, rates: dict[RankName, float]) -> list[Cell]:
    load, state = rank.load, rank.excluded or rank.state
    used = load.used_pages + load.quarantined_pages
    rate = rates.get(name_of(rank.rank))
    return [
        _name(rank.rank),
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
    """Return the rate at which a prefill rank computes prompts, or that a
    decode rank's sequences get in all.
    """
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
        _name(request.decode) if request.HasField("decode") else Text("waits", _WARN),
        _name(request.prefill) if request.HasField("prefill") else "",
        _time(age_s),
        str(request.prompt_tokens),
        str(request.completion_tokens),
    ]


def _finished_row(ago_s: float, request: FinishedRequest) -> list[Cell]:
    finish, usage = request.finish, request.finish.usage
    first_s = finish.stages.first_token_s
    return [
        request.request_id,
        request.tenant,
        _time(ago_s),
        _name(finish.placement.decode) if finish.HasField("placement") else "",
        Bar(usage.decode_prefix_len, usage.delta_tokens, usage.prompt_tokens),
        str(usage.prompt_tokens or ""),
        f"{usage.decode_prefix_len / usage.prompt_tokens:.0%}" if usage.prompt_tokens else "",
        format_bytes(usage.kv_bytes_moved) if usage.delta_tokens else "",
        _time(first_s) if first_s else "",
        str(request.completion_tokens or ""),
        _end(request),
    ]


def _end(request: FinishedRequest) -> Text:
    if request.outcome != "ok":
        name = _FAILURES.get(request.outcome, request.outcome.lower())
        return Text(name, _WARN if name == "aborted" else _BAD)
    return Text(common_pb2.FinishReason.Name(request.finish.reason).removeprefix("FINISH_REASON_").lower())


def _name(rank: common_pb2.RankId) -> str:
    return f"{rank.worker}/{rank.rank}"


def _time(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_970 else f"{seconds / 3_600:.1f} h"
