"""This module finds out the width and the colours of the terminal that a command writes to."""

import shutil
import sys
from typing import Literal, TextIO

from rich.console import Console

from services.observe import log_lines

Color = Literal["auto", "always", "never"]
COLOR_HELP = "whether to use colours; auto: at a terminal, unless NO_COLOR is set"


def width(stream: TextIO | None = None) -> int | None:
    """Return the terminal's columns; None if the stream is no terminal, as programs want lines unfolded."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream.isatty() else None


def is_colored(choice: Color, stream: TextIO) -> bool:
    return log_lines.is_colored(stream) if choice == "auto" else choice == "always"


def console(stream: TextIO, choice: Color) -> Console:
    colored = is_colored(choice, stream)
    return Console(
        file=stream,
        force_terminal=colored or None,
        color_system="auto" if colored else None,
        width=width(stream),
        soft_wrap=not stream.isatty(),
    )
