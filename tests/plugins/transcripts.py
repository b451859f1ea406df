"""Golden transcripts: a text file of commands and of what each of them led to, readable as a story.

    # What a reader should know; a comment goes on until the command.
    ticket A prompt=10 from=4
    ----
    says: A accepted

    land
    ----
    says: A landed, 200 bytes

A block ends at a blank line. Its first line that is no comment is the command: a name, words, and
`name=value`. More lines before the `----` are the command's body. What follows is the output, without blank
lines. The format is that of Go's datadriven, which raft and etcd write theirs in.

A test hands in the function that performs a command; `transcripts_beside` finds the files:

    @pytest.mark.parametrize("path", transcripts_beside(__file__, "transfers"), ids=stem)
    def test_transfers(path, play):
        play(path, Transfers().perform)       # Command in, lines out

An IsthmusError is output too: what is refused belongs to the story. `pytest --rewrite-transcripts` writes
what came out instead of comparing; commit that only when you can say why each line is right.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.values.errors import IsthmusError

_BAR = "----"


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    words: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    body: tuple[str, ...] = ()

    @classmethod
    def read(cls, line: str, body: Iterable[str]) -> "Command":
        name, *rest = line.split()
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        return cls(name, tuple(word for word in rest if "=" not in word), options, tuple(body))


Perform = Callable[[Command], Iterable[str]]


def transcripts_beside(test_file: str, folder: str = "") -> list[Path]:
    """Of the folder transcripts/ that stands beside a test, in order of their names; never none."""
    paths = sorted((Path(test_file).parent / "transcripts" / folder).glob("*.txt"))
    assert paths, f"no transcripts beside {test_file}"
    return paths


def stem(path: Path) -> str:
    return path.stem


def played(text: str, perform: Perform) -> str:
    """The transcript with what `perform` puts out now."""
    return "\n\n".join("\n".join(_played(block, perform)) for block in _blocks(text)) + "\n"


def _blocks(text: str) -> list[list[str]]:
    blocks = [block.strip("\n").split("\n") for block in text.split("\n\n")]
    return [block for block in blocks if any(block)]


def _played(block: list[str], perform: Perform) -> Iterator[str]:
    asked = block[: block.index(_BAR)] if _BAR in block else block
    yield from asked
    lines = [line for line in asked if not line.startswith("#")]
    if lines:
        yield _BAR
        yield from _output(Command.read(lines[0], lines[1:]), perform)


def _output(command: Command, perform: Perform) -> Iterator[str]:
    try:
        for line in perform(command):
            assert line.strip() and line != _BAR, f"{command} put out a line that a transcript cannot hold"
            yield line
    except IsthmusError as error:
        yield f"{type(error).__name__}: {error}"


@pytest.fixture
def play(request: pytest.FixtureRequest) -> Callable[[Path, Perform], None]:
    def play(path: Path, perform: Perform) -> None:
        text = path.read_text()
        now = played(text, perform)
        if request.config.getoption("--rewrite-transcripts"):
            path.write_text(now)
        else:
            assert now == text, f"{path.name} tells another story; --rewrite-transcripts writes this one"

    return play


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="write what came out, and compare nothing"
    )
