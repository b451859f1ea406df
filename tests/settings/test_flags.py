"""Flags to a dataclass and back."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.settings.flags import describe, load, refusing, setting, to_flags
from services.values.errors import ConfigError, Unavailable


class Mood(Enum):
    CALM = "calm"
    KEEN = "keen"


@dataclass(frozen=True)
class Settings:
    """Settings of nothing."""

    model: Path = setting(help="directory of the checkpoint")
    page_size: int = setting(64, "tokens per page; 100 % of them")
    rate: float = 1.5
    tls: bool = setting(False)
    engine: Literal["fake", "torch"] = setting("fake")
    mood: Mood = Mood.CALM
    name: str = "nobody"
    timeout_s: float | None = setting(3.0)
    ca: Path | None = None
    peers: tuple[str, ...] = setting(("a:1",))
    sizes: tuple[int, ...] = ()
    arguments: tuple[str, ...] = setting((), split=False)

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError("--page-size must be positive")


def read(*flags: str) -> Settings:
    return load(Settings, ["--model=m", *flags], prog="isthmus-test")


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as stop:
        read(*flags)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_bad_flag_is_named_in_one_sentence(subtests, capsys):
    for flag, words in [
        ("--page-size=many", ["--page-size", "whole number", "'many'"]),
        ("--rate=nan", ["--rate", "finite number"]),
        ("--rate=inf", ["--rate", "finite number"]),
        ("--timeout-s=-inf", ["--timeout-s", "finite number"]),
        ("--tls=yes", ["--tls", "true", "false"]),
        ("--engine=vllm", ["--engine", "fake", "torch"]),
        ("--mood=CALM", ["--mood", "calm"]),
        ("--sizes=1,x", ["--sizes", "'x'"]),
        ("--page-size=0", ["--page-size must be positive"]),
        ("--page-siz=1", ["--page-siz"]),
        ("--unknown=1", ["--unknown"]),
    ]:
        with subtests.test("a bad flag is named in one sentence", flag=flag, words=words):
            sentence = refusal(capsys, flag)
            assert sentence.count("\n") == 1
            assert sentence.startswith("isthmus-test: ")
            for word in words:
                assert word in sentence
    with subtests.test("a missing flag is named"):
        with pytest.raises(SystemExit) as stop:
            load(Settings, [], prog="isthmus-test")
        assert stop.value.code == 2
        assert "--model" in capsys.readouterr().err


def test_help_lists_every_flag_with_its_sentence_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--page-size N tokens per page; 100 % of them (default: 64)" in text
    assert "--engine fake|torch" in text
    assert "--model PATH directory of the checkpoint (required)" in text
    assert "--ca PATH (default: none)" in text


@dataclass(frozen=True)
class Errand:
    """A command on some things in one place."""

    place: str = setting(help="where", positional=True)
    things: tuple[str, ...] = setting(help="what", positional=True)
    fast: bool = setting(False)


@dataclass(frozen=True)
class Question:
    """A command that is asked something."""

    text: str = setting("none", "what is asked", bare="TEXT")
    fast: bool = setting(False)


def test_what_a_command_is_about(subtests, capsys):
    for argv in [
        ["here", "a", "b,c"],
        ["--fast=false", "here", "a", "b", "c"],
        ["here", "a,b,c", "--fast=false"],
    ]:
        with subtests.test("what a command is about stands by itself", argv=argv):
            assert load(Errand, argv) == Errand("here", ("a", "b", "c"))
            assert load(Errand, [*argv, "--fast"]) == Errand("here", ("a", "b", "c"), fast=True)
    with subtests.test("what a command is about is required and described"):
        with pytest.raises(SystemExit) as stop:
            load(Errand, ["here"], prog="isthmus-test")
        assert stop.value.code == 2
        assert "THINGS" in capsys.readouterr().err
        place, things, fast = describe(Errand)
        assert (place.name, place.positional, place.default) == ("PLACE", True, None)
        assert (things.name, things.repeated, fast.positional) == ("THINGS", True, False)
        assert to_flags(Errand("here", ("a", "b"), fast=True)) == ["here", "a", "b", "--fast=true"]
    for argv, question in [
        ([], Question()),
        (["why"], Question("why")),
        ([""], Question("")),
        (["--text=why"], Question("why")),
        (["--fast", "why"], Question("why", True)),
        (["--fast=false", "why"], Question("why")),
        (["why", "--fast"], Question("why", True)),
        (["--fast", "--", "-5"], Question("-5", True)),
        (["--", "--fast"], Question("--fast")),
    ]:
        with subtests.test("a bare setting needs no name", argv=argv, question=question):
            assert load(Question, argv) == question
            assert load(Question, to_flags(question)) == question


def test_a_setting_of_an_unknown_type_is_our_own_mistake():
    @dataclass(frozen=True)
    class Odd:
        table: dict[str, str] = setting(None)

    with pytest.raises(TypeError, match="dict"):
        load(Odd, [])


plain = st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"]), min_size=1)
every_settings = st.builds(
    Settings,
    model=plain.map(Path),
    page_size=st.integers(1),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    tls=st.booleans(),
    engine=st.sampled_from(["fake", "torch"]),
    mood=st.sampled_from(Mood),
    name=st.text(),
    timeout_s=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ca=st.none() | plain.map(Path),
    peers=st.lists(plain).map(tuple),
    sizes=st.lists(st.integers()).map(tuple),
    arguments=st.lists(st.text(min_size=1)).map(tuple),
)


@given(every_settings)
def test_flags_round_trip(settings):
    assert load(Settings, to_flags(settings)) == settings


def test_a_flag_sets_its_field(subtests):
    with subtests.test("defaults are the dataclass own"):
        assert read() == Settings(model=Path("m"))
    for flags, name, value in [
        (["--page-size=16"], "page_size", 16),
        (["--page-size", "16"], "page_size", 16),
        (["--page-size=16", "--page-size=32"], "page_size", 32),
        (["--rate=-2e3"], "rate", -2000.0),
        (["--tls=true"], "tls", True),
        (["--tls"], "tls", True),
        (["--tls", "true"], "tls", True),
        (["--tls", "--tls=false"], "tls", False),
        (["--tls", "--rate=2"], "rate", 2.0),
        (["--engine=torch"], "engine", "torch"),
        (["--mood=keen"], "mood", Mood.KEEN),
        (["--name="], "name", ""),
        (["--name=--"], "name", "--"),
        (["--name=--tls"], "name", "--tls"),
        (["--timeout-s="], "timeout_s", None),
        (["--ca=/ca.pem"], "ca", Path("/ca.pem")),
        (["--peers=b:1,c:2", "--peers=d:3"], "peers", ("b:1", "c:2", "d:3")),
        (["--peers="], "peers", ()),
        (["--sizes=1,2"], "sizes", (1, 2)),
    ]:
        with subtests.test("a flag sets its field", flags=flags, name=name, value=value):
            assert getattr(read(*flags), name) == value
    with subtests.test("a default is not repeated as a flag"):
        assert to_flags(Settings(model=Path("m"), timeout_s=None)) == ["--model=m", "--timeout-s="]
    for peers in [("a,b",), ("",)]:
        with (
            subtests.test("what flags cannot say is refused", peers=peers),
            pytest.raises(ConfigError, match="--peers"),
        ):
            to_flags(Settings(model=Path("m"), peers=peers))


def test_refusing_says_why_and_whether_another_start_may_do(subtests, capsys):
    for error, code in [(ConfigError, 78), (Unavailable, 75)]:
        with subtests.test(error=error, code=code):
            told = []
            with pytest.raises(SystemExit) as stop, refusing("isthmus-decode", told.append):
                raise error("the checkpoint has no config.json")
            assert stop.value.code == code
            assert capsys.readouterr().err == "isthmus-decode: the checkpoint has no config.json\n"
            assert told == ["the checkpoint has no config.json"]
