"""This module formats tables, names and sizes, and folds texts for the width of a terminal."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from services.wire.isthmus.v1 import common_pb2, generation_pb2

_GAP = "  "
_INDENT = "     "
_ALWAYS_SHOWN = 2  # These columns stay if not all fit.


def format_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int | None = None,
    lead: Sequence[str] = (),
) -> str:
    """Format rows as columns, with numbers aligned right and text aligned left.

    `width` is the terminal's columns; None means no limit. A table that is too wide gets its headings broken
    into lines. If it still does not fit, only the columns of `lead` (by default the first two) are shown, and
    below each row its other values that are not empty, each with its heading.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headings))
    ]
    for texts in ([[heading] for heading in headings], [_broken(heading) for heading in headings]):
        lines = _lines(texts, cells, numeric)
        if width is None or max(map(len, lines)) <= width:
            return "\n".join(lines)
    assert width is not None
    return _folded(headings, cells, numeric, width, lead or headings[:_ALWAYS_SHOWN])


def _lines(
    headings: Sequence[Sequence[str]], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> list[str]:
    widths = [max(map(len, (*h, *(row[i] for row in cells)))) for i, h in enumerate(headings)]

    def line(texts: Sequence[str]) -> str:
        aligned = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(texts, widths, numeric, strict=True))
        return _GAP.join(aligned).rstrip()

    height = max(map(len, headings), default=1)
    heads = ([""] * (height - len(heading)) + [*heading] for heading in headings)
    rule = _GAP.join("-" * width for width in widths)
    return [*map(line, zip(*heads, strict=True)), rule, *map(line, cells)]


def _broken(heading: str) -> list[str]:
    return re.findall(r"[^ _]+_?", heading) or [heading]


def _folded(
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    width: int,
    lead: Sequence[str],
) -> str:
    first = [headings.index(name) for name in lead]
    others = [i for i in range(len(headings)) if i not in first]
    picked = [[row[i] for i in first] for row in cells]
    heading, rule, *beside = _lines([[headings[i]] for i in first], picked, [numeric[i] for i in first])
    lines = [heading, rule]
    for line, row in zip(beside, cells, strict=True):
        lines += [line, *_filled([f"{headings[i]} {row[i]}" for i in others if row[i]], width)]
    return "\n".join(lines)


def _filled(texts: Sequence[str], width: int) -> Iterator[str]:
    line = ""
    for text in texts:
        if line and len(line) + len(_GAP) + len(text) > width:
            yield line
            line = ""
        line = f"{line}{_GAP}{text}" if line else f"{_INDENT}{text}"
    if line:
        yield line


def fold(line: str, width: int | None, indent: int = 0) -> str:
    if width is None or len(line) <= width:
        return line
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.wrap(line))


def format_rank(rank: common_pb2.RankId) -> str:
    return f"{rank.worker}/{rank.rank}"


def format_plan(placement: generation_pb2.Placement) -> str:
    return str(common_pb2.Plan.Name(placement.plan)).removeprefix("PLAN_").lower()


def format_reason(finish: generation_pb2.Finish) -> str:
    return str(common_pb2.FinishReason.Name(finish.reason)).removeprefix("FINISH_REASON_").lower()


# A turn of a conversation is shown by these columns, which others may follow.
TURN_HEADINGS = ("turn", "decode rank", "plan", "prompt tokens", "decode_prefix_len", "KV moved", "KV saved")


def turn_row(turn: int, finish: generation_pb2.Finish) -> tuple[object, ...]:
    usage, placement = finish.usage, finish.placement
    sizes = format_bytes(usage.kv_bytes_moved), format_bytes(usage.kv_bytes_saved)
    where = format_rank(placement.decode), format_plan(placement)
    return turn, *where, usage.prompt_tokens, usage.decode_prefix_len, *sizes


def format_bytes(size_bytes: float) -> str:
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    units = ["KiB", "MiB", "GiB"]
    while size_bytes >= 1024 * 1024 and len(units) > 1:
        size_bytes /= 1024
        units.pop(0)
    return f"{size_bytes / 1024:.1f} {units[0]}"
