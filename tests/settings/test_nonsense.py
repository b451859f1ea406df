"""What no service could work with is refused when it starts, with a sentence that names flag and value."""

from dataclasses import dataclass

import pytest

from services.rank.config import RankConfig
from services.router.config import RouterConfig
from services.settings.flags import Bounds, check_bounds, describe, load, setting
from services.values.errors import ConfigError
from settings.nonsense import EVERY_SERVICE, RANK, ROUTER, command_line


@pytest.mark.parametrize(
    ("cls", "flag", "value", "sentence"),
    [(RankConfig, *case) for case in RANK + EVERY_SERVICE]
    + [(RouterConfig, *case) for case in ROUTER + EVERY_SERVICE],
)
def test_it_is_refused_with_a_sentence(cls, flag, value, sentence, capsys):
    given = ["--model=m"] + (["--worker=w"] if cls is RankConfig else [])
    with pytest.raises(SystemExit) as refusal:
        load(cls, [*given, *command_line(flag, value)], prog="it")
    assert refusal.value.code == 2
    assert capsys.readouterr().err.startswith(f"it: {sentence}")


@pytest.mark.parametrize("cls", [RankConfig, RouterConfig])
def test_every_number_has_bounds(cls):
    """Ports have theirs where they are counted: services.host.ports.check_port."""
    numbers = [flag for flag in describe(cls) if flag.hint in ("N", "NUMBER") and "port" not in flag.name]
    assert numbers and [flag.name for flag in numbers if flag.bounds == Bounds()] == []


@pytest.mark.parametrize("cls", [RankConfig, RouterConfig])
def test_defaults_are_within_their_bounds(cls):
    cls(model="m", **({"worker": "w"} if cls is RankConfig else {}))


def test_none_and_each_item_of_a_tuple():
    @dataclass(frozen=True)
    class Config:
        count: int | None = setting(None, bounds=Bounds(at_least=1))
        names: tuple[str, ...] = setting((), bounds=Bounds(pattern="[a-z]+", form="small letters"))

    check_bounds(Config())
    check_bounds(Config(1, ("a", "b")))
    with pytest.raises(ConfigError, match=r"^--names must be small letters, got 'B'$"):
        check_bounds(Config(1, ("a", "B")))
    with pytest.raises(ConfigError, match=r"^--count must be 1 or more, got 0$"):
        check_bounds(Config(0))
