"""Traces on disk: JSON lines of timestamp, input_length, output_length and hash_ids, as Mooncake published
them."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from services.cli.bench.workload import Traced
from services.values.errors import ConfigError

_FIELDS = ("timestamp", "input_length", "output_length")


def read_trace(path: Path, most: int | None) -> Iterator[Traced]:
    """Line by line, at most so many. Raises ConfigError, naming the line that is none, or is out of order."""
    last_ms = float("-inf")
    for number, text in enumerate(islice(_lines(path), most), start=1):
        line = _line(text, f"{path}, line {number}")
        if line.timestamp < last_ms:
            raise ConfigError(f"{path}, line {number}: its timestamp is before that of the line before")
        last_ms = line.timestamp
        yield line


def count_lines(path: Path, most: int | None) -> int:
    """Raises ConfigError when there is no file."""
    return sum(1 for _ in islice(_lines(path), most))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {error}") from error


def _line(text: str, where: str) -> Traced:
    try:
        given = json.loads(text)
        timestamp, input_length, output_length = (given[name] for name in _FIELDS)
        line = Traced(float(timestamp), int(input_length), int(output_length), given.get("hash_ids", ()))
        if min(line.input_length, line.output_length) < 1 or any(name < 0 for name in line.hash_ids):
            raise ValueError("lengths are 1 or more, hash_ids 0 or more")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected {', '.join(_FIELDS)} and hash_ids: {error!r}") from error
    return line
