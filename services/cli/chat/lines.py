"""The lines of a chat come from somebody who types, or from a pipe."""

import atexit
import os
import readline
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from services.values.errors import InvalidRequest

_PROMPT, _GOES_ON = "> ", ". "
_MOST_REMEMBERED = 1000


def piped() -> Iterator[str]:
    """Yield one turn a line; blank ones say nothing. Raises InvalidRequest where it is no text."""
    try:
        yield from (text for line in sys.stdin if (text := line.strip()))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8: {error}") from error


def typed(commands: Sequence[str], say_leaving: str, is_colored: bool) -> Iterator[str]:
    """Yield what is typed, until Ctrl-D, or Ctrl-C twice. A line that ends with
    a backslash goes on in the next.
    """
    _set_up(commands)
    warned = False
    while True:
        try:
            text = _whole(is_colored).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if warned:
                return
            print(say_leaving)
            warned = True
            continue
        warned = False
        if text:
            yield text


def _whole(is_colored: bool) -> str:
    text = input(_marked(_PROMPT) if is_colored else _PROMPT)
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input(_GOES_ON)}"
    return text


def _marked(prompt: str) -> str:
    """Make it bold; between 1 and 2 stands what takes no column, as readline wants to be told."""
    return f"\001\x1b[1m\002{prompt}\001\x1b[0m\002"


def _set_up(commands: Sequence[str]) -> None:
    readline.set_completer_delims("")
    readline.set_completer(completer(commands))
    readline.parse_and_bind("tab: complete")
    file = history_file()
    with suppress(OSError):  # There is none yet, or none that we may read.
        readline.read_history_file(file)
    readline.set_history_length(_MOST_REMEMBERED)
    atexit.register(_keep, file)


def completer(commands: Sequence[str]) -> "_Completer":
    return _Completer([f"/{name}" for name in commands])


class _Completer:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, text: str, state: int) -> str | None:
        found = [name for name in self._names if text and name.startswith(text)]
        return found[state] if state < len(found) else None


def history_file() -> Path:
    """Return the file as the XDG base directory specification has it."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "isthmus" / "chat_history"


def _keep(file: Path) -> None:
    """Keep it for its owner's eyes alone; a home that cannot be written to keeps none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.write_history_file(file)
