"""What can stand where on our command line, as the parser knows it."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.settings.flags import FlagDescription

_FILES = "PATH"


@dataclass(frozen=True, slots=True)
class Flag:
    name: str  # with its dashes
    meaning: str
    choices: tuple[str, ...]
    takes_path: bool
    stands_alone: bool  # as a bool may


@dataclass(frozen=True, slots=True)
class CommandWords:
    name: str
    meaning: str
    flags: tuple[Flag, ...]
    takes_path: bool  # what it is about
    choices: tuple[str, ...] = ()  # of what it is about


def words_of(name: str, meaning: str, described: Iterable[FlagDescription]) -> CommandWords:
    settings = list(described)
    flags = tuple(_flag(each) for each in settings if not each.positional)
    about = [each for each in settings if each.positional or each.bare]
    choices = tuple(choice for each in about for choice in each.choices)
    return CommandWords(name, meaning, flags, any(each.hint == _FILES for each in about), choices)


def _flag(description: FlagDescription) -> Flag:
    alone = description.choices == ("true", "false")
    path = description.hint == _FILES
    return Flag(f"--{description.name}", description.help, description.choices, path, alone)
