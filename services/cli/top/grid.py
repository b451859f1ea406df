"""These pure functions fit columns to a terminal: bars take what is left, names give way."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_GAP, _LEAST_BAR = 2, 8
_HEADING = "dim"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """These draw a bar's parts, in their order, and stand for what was left out."""

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
        """Draw it so that what is there is seen, however little it is."""
        if not self.whole:
            return Text(" " * width)
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
    """A `spare` one is left out where the others do not fit beside it; of several the highest goes first.

    It may get as narrow as `least`, cut in the middle; with None it stays as it is.
    """

    heading: str
    right: bool = False
    spare: int = 0
    least: int | None = None
    most: int = 40  # A bar is as wide at most.


_Table = list[tuple[Column, list[Cell]]]  # It goes by columns.


def grid(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, glyphs: Glyphs) -> list[Text]:
    """Return the headings' line and one for each row, none longer than `width`.

    A spare column is shown where something stands in it.
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
    """Return the row of that number; -1 stands for the headings."""
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
    """Cut it in the middle: names of pods are alike at the front, and a rank's number stands at the end."""
    text = Text(cell) if isinstance(cell, str) else cell.copy()
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    head = width - 1 - tail
    return text[:head] + Text(more) + (text[-tail:] if tail else Text())


def _cells(part: int, whole: int, width: int) -> int:
    return min(width, max(1, round(width * part / whole))) if part else 0
