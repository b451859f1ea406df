"""This module reads a service's settings from command-line flags, and writes them back as flags.

A frozen dataclass is the only list of a service's settings: `page_size: int = setting(64, "...")` is
`--page-size=64`. A chart passes its values as flags, and a supervisor passes its own on with `to_flags`. We
use no environment variables: Kubernetes puts <SERVICE>_PORT=tcp://... into every pod of a namespace, which
would set ours.

A field may be a str, int, float, bool (true or false), Path, Enum (by value), Literal, one of these or None
(`--flag=` is None), or a tuple of any length of these (separated by commas, or the flag again; `--flag=` is
the empty tuple; with `split=False` a comma is part of the value). If another flag is given again, the last
one counts. `--undo` alone means `--undo=true`. A `positional` setting, the object of a command, is given
without its name. A `bare` one may be: `isthmus up MODEL` means `--model=MODEL`.
"""

import argparse
import difflib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from services.observe import json_lines
from services.values.errors import ConfigError, Unavailable

_MOST = 2
_LIKENESS = 0.7


def nearest(word: str, known: Collection[str]) -> str:
    """Return "; did you mean ...?", or "" if no known word is similar."""
    found = difflib.get_close_matches(word, sorted(known), n=_MOST, cutoff=_LIKENESS)
    return f"; did you mean {' or '.join(found)}?" if found else ""


class Parser(argparse.ArgumentParser):
    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Keep a value that is `--` (`--name=--`): argparse drops it before Python 3.13."""
        if action.option_strings and arg_strings == ["--"]:
            return "--"
        return super()._get_values(action, arg_strings)

    def read(self, argv: Sequence[str], bare: str) -> dict[str, Any]:
        """Return the given values by destination.

        `bare` is the destination of a value without a flag, between flags or behind `--`. Raises SystemExit.
        """
        given, unknown = self._read_bare(argv, bare) if bare else self.parse_known_args(argv)
        if unknown:
            self._refuse(unknown)
        return vars(given)

    def _read_bare(self, argv: Sequence[str], bare: str) -> tuple[argparse.Namespace, list[str]]:
        """Parse only what precedes `--`: argparse parses twice, and would find flags behind it."""
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
        """Print one sentence without the usage: among thirty flags nobody would find the sentence."""
        text = f"{self.prog}: {message} (--help lists every flag)"
        if json_lines.FLAG in sys.argv:  # Logging is not set up yet.
            text = json_lines.json_line(text, self.prog, time.time(), "ERROR")
        self.exit(2, f"{text}\n")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """These are the allowed values of a setting, or of each item of a tuple. None is always allowed."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    # This regular expression must match the whole text, and must be valid in Go's RE2, too.
    pattern: str | None = None
    form: str = ""  # It describes `pattern` in words.

    def refusal(self, value: Any) -> str | None:
        """Return the end of a sentence that begins with the flag, or None if the value is allowed."""
        wrong = (
            (self.at_least is not None and not value >= self.at_least)
            or (self.at_most is not None and not value <= self.at_most)
            or (self.above is not None and not value > self.above)
            or (self.pattern is not None and re.fullmatch(self.pattern, str(value)) is None)
        )
        return f"{self._wanted()}, got {_shown(value)}" if wrong else None

    def _wanted(self) -> str:
        if self.pattern is not None:
            return f"must be {self.form}"
        if self.above is not None:
            return f"must be above {_shown(self.above)}"
        if self.at_least is not None and self.at_most is not None:
            return f"is between {_shown(self.at_least)} and {_shown(self.at_most)}"
        return f"must be {_shown(self.at_least)} or more"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


_ANY = Bounds()


def setting(
    default: Any = MISSING,
    help: str = "",
    split: bool = True,
    positional: bool = False,
    bare: str = "",
    bounds: Bounds = _ANY,
    formerly: str = "",
    choices: Sequence[str] = (),
) -> Any:
    """Make a dataclass field; `help` is the sentence that `--help` shows.

    It is required if it has no default, and a `positional` one must have none. One setting may be `bare`,
    which is its name in the help when it is given without its flag. `check_bounds` and the chart's schema
    enforce `bounds`. The flag `formerly` means the same setting, and no help shows it.
    `choices` are all values of a text, if a Literal does not list them.
    """
    about = {"help": help, "split": split, "positional": positional, "bare": bare, "bounds": bounds}
    about |= {"formerly": formerly, "choices": choices}
    return field(default=default, metadata=about)


def check_bounds(config: Any) -> None:
    """Raise ConfigError that names a flag whose value is not allowed; a config's __post_init__ calls this."""
    for member in fields(config):
        bounds, value = member.metadata.get("bounds", _ANY), getattr(config, member.name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and (refusal := bounds.refusal(item)) is not None:
                raise ConfigError(f"--{member.name.replace('_', '-')} {refusal}")


def load(cls: type[T], argv: Sequence[str] | None = None, prog: str | None = None) -> T:
    """Build the dataclass `cls` from `argv` (by default sys.argv[1:]) and its own defaults.

    Raises:
        SystemExit: The code is 2 if a flag is unknown, missing or unreadable, or if `cls` raised ConfigError;
            stderr has one sentence with the reason. It is 0 for --help.
    """
    flags = _flags_of(cls)
    parser = Parser(prog=prog, description=cls.__doc__, allow_abbrev=False)
    for flag in flags:
        flag.add_to(parser)
    argv = _spelled_out(sys.argv[1:] if argv is None else argv, flags)
    given = parser.read(argv, bare="".join(flag.bare for flag in flags))
    given = {name: texts for name, texts in given.items() if texts not in (None, [])}
    try:
        for flag in flags:
            flag.take_bare(given)
        return cls(**{flag.name: flag.read(given[flag.name]) for flag in flags if flag.name in given})
    except ConfigError as error:
        parser.error(str(error))


def changed(config: T, texts: Mapping[str, str]) -> T:
    """Return the config with these settings, by field, each read as its flag's text. Raises ConfigError."""
    flags = {flag.name: flag for flag in _flags_of(type(config))}
    return replace(config, **{name: flags[name].read([text]) for name, text in texts.items()})  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class FlagDescription:
    name: str  # It has no leading dashes: page-size.
    hint: str  # It is one such as N, TEXT or on|off.
    default: tuple[str, ...] | None  # These are texts as in a flag; None means that the setting is required.
    repeated: bool
    help: str
    choices: tuple[str, ...] = ()  # If there are any, no other value is allowed.
    positional: bool = False
    bare: str = ""
    bounds: Bounds = _ANY


def describe(cls: type) -> list[FlagDescription]:
    return [flag.description() for flag in _flags_of(cls)]


def to_flags(config: Any) -> list[str]:
    """Return the flags from which `load` makes an equal `config`, without those of defaults. Raises
    ConfigError if a value cannot be written as a flag (for example a tuple's string with a comma)."""
    values = [(flag, getattr(config, flag.name)) for flag in _flags_of(type(config))]
    return [text for flag, value in values if value != flag.default for text in flag.write(value)]


@contextmanager
def refusing(prog: str, report: Callable[[str], None] = lambda why: None) -> Iterator[None]:
    """Print the sentence of a ConfigError or Unavailable to stderr, pass it to `report`, and exit.

    The code EX_CONFIG (78) tells a supervisor that another start will not help; EX_TEMPFAIL (75) that it may.
    """
    try:
        yield
    except (ConfigError, Unavailable) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        report(str(error))
        sys.exit(os.EX_CONFIG if isinstance(error, ConfigError) else os.EX_TEMPFAIL)


@dataclass(frozen=True, slots=True)
class _Scalar:
    read: Callable[[str], Any]  # It raises ValueError.
    write: Callable[[Any], str]
    expected: str  # It completes "expected ...".
    metavar: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    scalar: _Scalar
    optional: bool
    repeated: bool
    default: Any  # MISSING means that the setting is required.
    help: str
    split: bool  # Commas separate the items of a tuple.
    positional: bool
    bare: str
    bounds: Bounds
    formerly: str

    @property
    def text(self) -> str:
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")

    def description(self) -> FlagDescription:
        default = None if self.default is MISSING else tuple(self._texts(self.default))
        return FlagDescription(
            self.text.removeprefix("--"),
            self.scalar.metavar,
            default,
            self.repeated,
            self.help,
            self.scalar.choices,
            self.positional,
            self.bare,
            self.bounds,
        )

    def add_to(self, parser: Parser) -> None:
        if self.positional:
            nargs: str | int = "+" if self.repeated else 1
            parser.add_argument(self.name, metavar=self.text, nargs=nargs, help=self.help)
        else:
            parser.add_argument(self.text, dest=self.name, action="append", **self._help_arguments())
        if self.formerly:
            parser.add_argument(f"--{self.formerly}", dest=self.name, action="append", help=argparse.SUPPRESS)
        if self.bare:
            parser.add_argument(self.bare, nargs="?", help=f"as {self.text}")

    def take_bare(self, given: dict[str, Any]) -> None:
        if self.bare in given:
            text = given.pop(self.bare)
            if self.name in given:
                raise ConfigError(f"{self.text} is given, and {text!r} beside it: which?")
            given[self.name] = [text]
        elif self.bare and self.default is MISSING and self.name not in given:
            raise ConfigError(f"{self.bare} is missing: {self.help}")

    def _help_arguments(self) -> dict[str, Any]:
        required = self.default is MISSING and not self.bare
        text = f"{self.help}{self._help_of_default()}".strip()
        return {"required": required, "metavar": self.scalar.metavar, "help": text.replace("%", "%%")}

    def _help_of_default(self) -> str:
        if self.default is MISSING:
            return " (required)"
        default = ", ".join(self._texts(self.default))
        is_in_help = not default and "default: " in self.help  # The help text names the default itself.
        return "" if is_in_help else f" (default: {default or 'none'})"

    def read(self, texts: Sequence[str]) -> Any:
        if self.repeated:
            return tuple(self._read_one(item) for text in texts for item in self._items(text) if item)
        if self.optional and not texts[-1]:
            return None
        return self._read_one(texts[-1])

    def _items(self, text: str) -> list[str]:
        return text.split(",") if self.split else [text]

    def _read_one(self, text: str) -> Any:
        try:
            return self.scalar.read(text)
        except (ValueError, KeyError):
            raise ConfigError(f"{self.text}: expected {self.scalar.expected}, got {text!r}") from None

    def write(self, value: Any) -> list[str]:
        texts = self._texts(value) or [""]
        if self.read(texts) != value:
            raise ConfigError(f"{self.text} cannot say {value!r}")
        return texts if self.positional else [f"{self.text}={text}" for text in texts]

    def _texts(self, value: Any) -> list[str]:
        if value is None:
            return []
        return [self.scalar.write(item) for item in (value if self.repeated else (value,))]


def _flags_of(cls: type) -> list[_Flag]:
    hints = get_type_hints(cls)
    return [_flag(member, hints[member.name]) for member in fields(cls) if member.init]


def _flag(member: Field[Any], hint: Any) -> _Flag:
    optional, hint = _without_none(hint)
    repeated = get_origin(hint) is tuple
    default, choices = member.default, member.metadata.get("choices", ())
    if member.default_factory is not MISSING:
        default = member.default_factory()
    return _Flag(
        name=member.name,
        scalar=_scalar(Literal[tuple(choices)] if choices else get_args(hint)[0] if repeated else hint),
        optional=optional,
        repeated=repeated,
        default=default,
        help=member.metadata.get("help", ""),
        split=member.metadata.get("split", True),
        positional=member.metadata.get("positional", False),
        bare=member.metadata.get("bare", ""),
        bounds=member.metadata.get("bounds", _ANY),
        formerly=member.metadata.get("formerly", ""),
    )


def _spelled_out(argv: Sequence[str], flags: Sequence[_Flag]) -> list[str]:
    bools = {flag.text for flag in flags if flag.scalar is _SCALARS[bool]}
    end = argv.index("--") if "--" in argv else len(argv)
    spelled = [
        f"{text}=true" if text in bools and following not in _BOOLS else text
        for text, following in pairwise([*argv[:end], ""])
    ]
    return [*spelled, *argv[end:]]


def _without_none(hint: Any) -> tuple[bool, Any]:
    if get_origin(hint) not in (Union, UnionType):
        return False, hint
    others = [member for member in get_args(hint) if member is not NoneType]
    if len(others) != 1 or get_origin(others[0]) is tuple:
        raise TypeError(f"a setting cannot be {hint}")
    return True, others[0]


def _scalar(hint: Any) -> _Scalar:
    if get_origin(hint) is Literal:
        return _choice({str(value): value for value in get_args(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice({str(member.value): member for member in hint})
    if hint not in _SCALARS:
        raise TypeError(f"a setting cannot be {hint}")
    return _SCALARS[hint]


def _choice(values: dict[str, Any]) -> _Scalar:
    names = {value: name for name, value in values.items()}
    return _Scalar(
        values.__getitem__, names.__getitem__, "one of " + ", ".join(values), "|".join(values), tuple(values)
    )


def _read_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # It might be sent as a deadline, and peers refuse an infinite one.
        raise ValueError("not finite")
    return value


def _read_text(text: str) -> str:
    """Refuse a byte that is not UTF-8: it becomes a surrogate, which no message can contain."""
    text.encode()
    return text


_BOOLS = {"true": True, "false": False}
_SCALARS: dict[type, _Scalar] = {
    str: _Scalar(_read_text, str, "text in UTF-8", "TEXT"),
    int: _Scalar(int, str, "whole number", "N"),
    float: _Scalar(_read_number, repr, "finite number", "NUMBER"),
    bool: _choice(_BOOLS),
    Path: _Scalar(Path, str, "path", "PATH"),
}
