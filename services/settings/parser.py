"""The parser under `flags.load` is argparse, whose refusals are one sentence each."""

import argparse
import difflib
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from services.observe import json_lines

_MOST = 2
_LIKENESS = 0.7


def nearest(word: str, known: Collection[str]) -> str:
    """Return "; did you mean ...?", or "" where nothing known is like it."""
    found = difflib.get_close_matches(word, sorted(known), n=_MOST, cutoff=_LIKENESS)
    return f"; did you mean {' or '.join(found)}?" if found else ""


class Parser(argparse.ArgumentParser):
    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Do as argparse, but let a value that is `--` stay one (`--name=--`): before 3.13 it is dropped."""
        if action.option_strings and arg_strings == ["--"]:
            return "--"
        return super()._get_values(action, arg_strings)

    def read(self, argv: Sequence[str], bare: str) -> dict[str, Any]:
        """Return what is given, by its destination.

        `bare` is the destination of what may be left out, and stand between flags or behind `--`. Raises
        SystemExit.
        """
        given, unknown = self._read_bare(argv, bare) if bare else self.parse_known_args(argv)
        if unknown:
            self._refuse(unknown)
        return vars(given)

    def _read_bare(self, argv: Sequence[str], bare: str) -> tuple[argparse.Namespace, list[str]]:
        """Read before and behind `--` apart.

        argparse looks for flags twice here, and the second time does not know what stood behind `--`.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        given, unknown = self.parse_known_intermixed_args(argv[:end])
        words = [*unknown, *argv[end + 1 :]]
        if words and getattr(given, bare) is None and not unknown:
            setattr(given, bare, words.pop(0))
        return given, words

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flags = [text for text in unknown if text.startswith("-")]
        if not flags:
            self.error(f"what is {unknown[0]!r}? A text of several words stands in quotes")
        name = flags[0].partition("=")[0]
        self.error(f"there is no flag {name}{nearest(name.replace('_', '-'), self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Say one sentence, without the usage: with thirty flags nobody would find the sentence."""
        text = f"{self.prog}: {message} (--help lists every flag)"
        if json_lines.FLAG in sys.argv:  # Nothing has been set up yet.
            text = json_lines.json_line(text, self.prog, time.time(), "ERROR")
        self.exit(2, f"{text}\n")
