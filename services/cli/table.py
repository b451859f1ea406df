"""Tables for a terminal."""

from collections.abc import Sequence


def format_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need; numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headings)]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headings))
    ]

    def line(texts: Sequence[str]) -> str:
        aligned = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(texts, widths, numeric, strict=True))
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headings), rule, *(line(row) for row in cells)])


def format_bytes(size_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    units = ["KiB", "MiB", "GiB"]
    while size_bytes >= 1024 * 1024 and len(units) > 1:
        size_bytes /= 1024
        units.pop(0)
    return f"{size_bytes / 1024:.1f} {units[0]}"
