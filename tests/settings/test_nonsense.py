"""What no service could work with is refused when it starts, with a sentence that names flag and value."""

from dataclasses import dataclass

import pytest

from services.rank.rank_config import RankConfig
from services.router.router_config import RouterConfig
from services.settings.flags import Bounds, check_bounds, describe, load, setting
from services.values.errors import ConfigError
from settings.nonsense import EVERY_SERVICE, RANK, ROUTER, command_line


def test_it_is_refused_with_a_sentence(subtests, capsys):
    for cls, flag, value, sentence in [(RankConfig, *case) for case in RANK + EVERY_SERVICE] + [
        (RouterConfig, *case) for case in ROUTER + EVERY_SERVICE
    ]:
        with subtests.test(cls=cls, flag=flag, value=value, sentence=sentence):
            given = ["--model=m"] + (["--worker=w"] if cls is RankConfig else [])
            with pytest.raises(SystemExit) as refusal:
                load(cls, [*given, *command_line(flag, value)], prog="it")
            assert refusal.value.code == 2
            assert capsys.readouterr().err.startswith(f"it: {sentence}")


def test_bounds(subtests):
    # Ports have theirs where they are counted: services.host.ports.check_port.
    for cls in [RankConfig, RouterConfig]:
        with subtests.test("every number has bounds", cls=cls):
            numbers = [
                flag for flag in describe(cls) if flag.hint in ("N", "NUMBER") and "port" not in flag.name
            ]
            assert numbers and [flag.name for flag in numbers if flag.bounds == Bounds()] == []
    for cls in [RankConfig, RouterConfig]:
        with subtests.test("defaults are within their bounds", cls=cls):
            cls(model="m", **({"worker": "w"} if cls is RankConfig else {}))
    with subtests.test("none and each item of a tuple"):

        @dataclass(frozen=True)
        class Config:
            count: int | None = setting(None, bounds=Bounds(at_least=1))
            names: tuple[str, ...] = setting((), bounds=Bounds(pattern="[a-z]+", form="small letters"))
            seed: int = setting(0, bounds=Bounds(at_least=0, at_most=2**64 - 1))

        check_bounds(Config())
        check_bounds(Config(1, ("a", "b")))
        with pytest.raises(ConfigError, match=r"^--names must be small letters, got 'B'$"):
            check_bounds(Config(1, ("a", "B")))
        with pytest.raises(ConfigError, match=r"^--count must be 1 or more, got 0$"):
            check_bounds(Config(0))
        with pytest.raises(ConfigError, match=r"^--seed is between 0 and 18446744073709551615, got -1$"):
            check_bounds(Config(seed=-1))
