"""The file of --models: what it may say, and what becomes of the models when it changes."""

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.models import Models
from services.router.models_file import ModelsFile, read_models
from services.router.router_config import RouterConfig
from services.values.errors import ConfigError

CONFIG = RouterConfig(
    model="/m/old", model_name="old", tool_parser="hermes", sampling_defaults="openai", chunk_size=64
)


def test_a_models_settings_are_flags() -> None:
    listed = read_models(
        json.dumps(
            {
                "models": {
                    "org/new": {"model": "/m/new"},
                    "other": {"model": "/m/other", "plans": ["local"], "chunk_size": 128, "pull": "off"},
                },
                "aliases": {"both": {"old": 90, "org/new": 10}, "one": {"old": 0, "other:a": 0.5}},
            }
        ),
        CONFIG,
    )
    new, other = listed.models.values()
    assert (new.served_name, new.model, new.tool_parser) == ("org/new", "/m/new", "auto")
    assert (new.sampling_defaults, new.chunk_size, new.pull) == ("openai", 64, "on")
    assert (other.served_name, other.plans, other.chunk_size, other.pull) == ("other", ("local",), 128, "off")
    assert listed.aliases == {"both": {"old": 90, "org/new": 10}, "one": {"old": 0, "other:a": 0.5}}
    assert read_models("{}", CONFIG).models == {}


def test_what_is_wrong_with_a_file_is_named(subtests: pytest.Subtests) -> None:
    new = {"model": "/m/new"}
    for read, what in [
        ([], "the file: must be an object"),
        ({"modles": {}}, "modles: is not known"),
        ({"models": {"new": {}}}, "models.new.model: must be set"),
        ({"models": {"new": {**new, "etcd": "e"}}}, "models.new.etcd: is not known"),
        ({"models": {"new": {**new, "tool_parser": "x"}}}, "models.new: --tool-parser: expected one of"),
        ({"models": {"new": {**new, "chunk_size": 0}}}, "models.new: --chunk-size must be 1 or more"),
        ({"models": {"new": {**new, "pull": True}}}, "models.new.pull: must be a string"),
        ({"models": {"old": new}}, "models.old: is --model's name"),
        ({"models": {"": new}}, "printable characters"),
        ({"models": {"модель": new}}, "printable characters of ASCII"),
        ({"aliases": {"both": {"new": 1}}}, "aliases.both.new: is no model"),
        ({"aliases": {"both": {"older:a": 1}}}, "aliases.both.older:a: is no model"),
        ({"aliases": {"both": {"old:": 1}}}, "aliases.both.old:: is no adapter's name"),
        ({"aliases": {"both": {"old:a/b": 1}}}, "aliases.both.old:a/b: is no adapter's name"),
        ({"aliases": {"both": {"old": -1}}}, "aliases.both.old: must be a number from 0"),
        ({"aliases": {"both": {"old": True}}}, "aliases.both.old: must be a number"),
        ({"aliases": {"both": {"old": 0}}}, "aliases.both: must give a model a weight above 0"),
        ({"aliases": {"old": {"old": 1}}}, "aliases.old: is a model's name, too"),
    ]:
        with subtests.test(read=read), pytest.raises(ConfigError, match=what):
            read_models(json.dumps(read), CONFIG)
    for text, what in [
        ("{", "must be JSON"),
        ('{"aliases": {"a": {"old": 1, "old": 2}}}', "'old' is there twice"),
    ]:
        with subtests.test(text=text), pytest.raises(ConfigError, match=what):
            read_models(text, CONFIG)


class Opening:
    """Opens models that run nothing, but for those whose directory is missing or broken."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []

    @contextlib.asynccontextmanager
    async def __call__(self, config: RouterConfig):
        if config.model == "missing":
            raise ConfigError("there is no such directory")
        if config.model == "broken":
            raise RuntimeError("a bug in a library")
        self.opened.append(config.model)
        generator = SimpleNamespace(num_running=0, is_running=lambda tenant, request_id: False)
        cluster = SimpleNamespace(ranks=lambda role: [])
        yield SimpleNamespace(
            name=config.served_name, path=config.model, generator=generator, cluster=cluster, defaults=None
        )
        self.closed.append(config.model)


def rank(model: str) -> Any:
    return SimpleNamespace(registration=SimpleNamespace(model=model))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_models_come_and_go_with_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.setattr("services.router.models_file._FOLLOW_S", 0.01)
    monkeypatch.setattr("services.router.models_file._LINGER_S", 0.3)
    path, models, opening = tmp_path / "models.json", Models(), Opening()

    def write(**directories: str) -> None:
        listed = {"models": {name: {"model": model} for name, model in directories.items()}}
        (tmp_path / "next").write_text(json.dumps(listed))
        (tmp_path / "next").rename(path)

    write(a="a1", b="missing", c="broken")
    ranks = [rank("old"), rank("a"), rank("b"), rank("stranger")]
    caplog.set_level(logging.INFO)
    file = ModelsFile(path, CONFIG, models, opening, lambda: ranks)
    async with file.serving():
        following = asyncio.create_task(file.run())
        with subtests.test("what cannot be opened keeps nothing else from being served"):
            assert models.others.keys() == {"a"} and models.failed == {"b", "c"}
            assert "model_failed model=b error=there is no such directory" in caplog.messages
            await until(lambda: "model_not_listed model=stranger" in caplog.messages)
            assert [each.registration.model for each in models._unserved()] == ["b", "stranger"]
        with subtests.test("it is tried again with the file's next change, and the others stay"):
            write(a="a1", b="b1")
            await until(lambda: models.others.keys() == {"a", "b"})
            assert opening.opened == ["a1", "b1"] and not models.failed
        with subtests.test("new settings that cannot be opened leave the old ones in force"):
            write(a="a1", b="missing")
            await until(lambda: models.failed == {"b"})
            assert models.others.keys() == {"a", "b"} and not opening.closed
        with subtests.test("a file that cannot be read changes nothing"):
            path.write_text("{")
            await until(lambda: "models_unreadable" in caplog.text)
            assert models.others.keys() == {"a", "b"}
        with subtests.test("a model that leaves is closed once it has answered"):
            leaving = models.others["a"]
            leaving.generator.num_running = 1  # type: ignore[misc]
            write(b="b1")
            await until(lambda: models.others.keys() == {"b"})
            await asyncio.sleep(0.05)
            assert not opening.closed
            leaving.generator.num_running = 0  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert not opening.closed, "a call may have taken it that is not counted yet"
            await until(lambda: opening.closed == ["a1"])
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    assert opening.closed == ["a1", "b1"]
