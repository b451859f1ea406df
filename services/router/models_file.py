"""The file of --models lists the models that a router serves beside --model, and the aliases.

    {
      "models": {"small-2": {"model": "/models/small-2", "tool_parser": "hermes"}},
      "aliases": {"small": {"small-1": 90, "small-2": 10}}
    }

A model's members are flags of the router (OWN and SHARED) and mean the same. An alias has the weights of its
sides: models, and adapters of them (MODEL:NAME), whether or not ranks have loaded these yet.

The file is read again when it changes. While it cannot be read the router keeps what it read last. A model
that cannot be opened does not keep the others from being served; it is tried again when the file changes.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from services.index.read.mirror import RankView
from services.observe import log_lines
from services.router.followed_file import FollowedFile
from services.router.models import Models, Weights, base_of
from services.router.router_config import RouterConfig
from services.router.served_model import Model
from services.router.tenants import without_repetitions
from services.settings.flags import changed
from services.values.adapter import is_name, model_and_adapter
from services.values.errors import ConfigError, IsthmusError
from services.values.request import MAX_ID_CHARS, is_id

log = logging.getLogger(__name__)

OWN = ("chat_template", "tool_parser", "reasoning_parser")  # Left out, these are the flag's default.
SHARED = (  # Left out, these are as for --model.
    *("sampling_defaults", "strict_tools", "control_tokens", "keep_thinking"),
    *("plans", "chunk_size", "itl_weight", "pull"),
)
_MOST_WEIGHT = 1e6
_LINGER_S = 10.0  # A model that the file names no more is closed after so long, at the earliest.
_FOLLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Listed:
    """`models` has each model's settings by its name, without --model's own; `aliases` has the weights."""

    models: Mapping[str, RouterConfig] = field(default_factory=dict)
    aliases: Mapping[str, Weights] = field(default_factory=dict)


def read_models(text: str, config: RouterConfig) -> Listed:
    """Return what the file lists beside --model. Raises ConfigError, which names the member."""
    try:
        read = json.loads(text, object_pairs_hook=without_repetitions)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"must be JSON: {error}") from error
    members = _object("the file", read)
    if unknown := members.keys() - {"models", "aliases"}:
        raise ConfigError(f"{min(unknown)}: is not known; models and aliases are")
    models = {
        _name("models", name): _settings(name, _object(f"models.{name}", about), config)
        for name, about in _object("models", members.get("models", {})).items()
    }
    if config.served_name in models:
        raise ConfigError(f"models.{config.served_name}: is --model's name, whose settings are the flags")
    known = {config.served_name, *models}
    aliases = {
        _name("aliases", name): _weights(name, _object(f"aliases.{name}", weights), known)
        for name, weights in _object("aliases", members.get("aliases", {})).items()
    }
    if both := known & aliases.keys():
        raise ConfigError(f"aliases.{min(both)}: is a model's name, too")
    return Listed(models, aliases)


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be an object")
    return value


def _name(kind: str, name: str) -> str:
    if not (name and is_id(name) and name.isascii()):  # It stands in a header.
        raise ConfigError(f"{kind}: {name!r} must be 1 to {MAX_ID_CHARS} printable characters of ASCII")
    return name


def _settings(name: str, about: Mapping[str, Any], config: RouterConfig) -> RouterConfig:
    known = ("model", *OWN, *SHARED)
    if unknown := about.keys() - set(known):
        raise ConfigError(f"models.{name}.{min(unknown)}: is not known; {', '.join(known)} are")
    if "model" not in about:
        raise ConfigError(f"models.{name}.model: must be set")
    flags = RouterConfig(model="")
    plain = replace(config, models=None, **{setting: getattr(flags, setting) for setting in OWN})
    texts = {setting: _text(f"models.{name}.{setting}", value) for setting, value in about.items()}
    try:
        return replace(changed(plain, texts), model_name=name)
    except ConfigError as error:
        raise ConfigError(f"models.{name}: {error}") from error


def _text(name: str, value: object) -> str:
    """Return the value as it would be in a flag."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{name}: must be a string, a number or a list of strings, got {value!r}")
    return str(value)


def _weights(alias: str, about: Mapping[str, Any], known: Iterable[str]) -> Weights:
    for model, weight in about.items():
        where = f"aliases.{alias}.{model}"
        base = base_of(model, known)
        if not base:
            raise ConfigError(
                f"{where}: is no model of the file, nor --model's name, nor an adapter of these"
            )
        if model != base and not is_name(model_and_adapter(model, base)):
            raise ConfigError(f"{where}: is no adapter's name")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight <= _MOST_WEIGHT:
            raise ConfigError(f"{where}: must be a number from 0 to {_MOST_WEIGHT:g}, got {weight!r}")
    if not any(about.values()):
        raise ConfigError(f"aliases.{alias}: must give a model a weight above 0")
    return about


@dataclass(frozen=True, slots=True)
class _Opened:
    config: RouterConfig
    model: Model
    stack: AsyncExitStack


class ModelsFile:
    """It opens the models of the file, and closes those that the file names no more once they have answered.

    `open_model` may raise any error, which is logged. `ranks` returns all ranks of the cluster. The
    constructor raises ConfigError where the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        config: RouterConfig,
        models: Models,
        open_model: Callable[[RouterConfig], AbstractAsyncContextManager[Model]],
        ranks: Callable[[], Iterable[RankView]],
    ) -> None:
        self._config = config
        self._models = models
        self._open_model = open_model
        self._ranks = ranks
        self._file = FollowedFile(
            "--models", path, partial(read_models, config=config), unreadable="models_unreadable"
        )
        self._opened: dict[str, _Opened] = {}
        self._leaving: list[tuple[_Opened, float]] = []  # With the times when they may be closed.
        self._reported: set[str] = set()
        models.watch_unserved(self._unserved)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve the models while the context lasts; `run` follows the file."""
        try:
            await self._apply()
            yield
        finally:
            for opened in (*self._opened.values(), *(each for each, _ in self._leaving)):
                await opened.stack.aclose()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_S)
            if self._file.is_new():
                self._reported.clear()
                await self._apply()
            self._models.note_ranks()
            self._report_unserved()
            await self._let_go()

    async def _apply(self) -> None:
        """Open what is new or was changed. A model whose new settings cannot be opened keeps its old ones."""
        listed = self._file.content
        new = [
            (name, config)
            for name, config in listed.models.items()
            if name not in self._opened or self._opened[name].config != config
        ]
        results = await asyncio.gather(*(self._open(name, config) for name, config in new))
        opened = {name: result for (name, _), result in zip(new, results, strict=True)}
        now = {name: opened.get(name) or self._opened.get(name) for name in listed.models}
        serving = {name: each for name, each in now.items() if each is not None}
        close_s = time.monotonic() + _LINGER_S
        left = [each for each in self._opened.values() if each not in serving.values()]
        self._leaving += [(each, close_s) for each in left]
        self._opened = serving
        failed = [name for name, each in opened.items() if each is None]
        self._models.set({name: each.model for name, each in serving.items()}, listed.aliases, failed)
        log_lines.event(
            log, "models_read", models=len(listed.models), aliases=len(listed.aliases), failed=len(failed)
        )

    async def _open(self, name: str, config: RouterConfig) -> _Opened | None:
        stack = AsyncExitStack()
        try:
            model = await stack.enter_async_context(self._open_model(config))
        except Exception as error:  # Whatever is wrong with one model, the others are served.
            is_known = isinstance(error, IsthmusError)
            log.log(logging.ERROR, "model_failed model=%s error=%s", name, error, exc_info=not is_known)
            return None
        log_lines.event(log, "model_opened", model=name, path=model.path)
        return _Opened(config, model, stack)

    async def _let_go(self) -> None:
        """Close the models that nobody uses any more. A call that has just taken one is not counted yet."""
        now = time.monotonic()
        for leaving in self._leaving[:]:
            opened, close_s = leaving
            if opened.model.generator.num_running or now < close_s:
                continue
            self._leaving.remove(leaving)
            self._models.left(opened.model)
            await opened.stack.aclose()
            log_lines.event(log, "model_closed", model=opened.model.name)

    def _unserved(self) -> list[RankView]:
        served = {self._config.served_name, *self._opened}
        return [view for view in self._ranks() if view.registration.model not in served]

    def _report_unserved(self) -> None:
        for name in {view.registration.model for view in self._unserved()} - self._reported:
            self._reported.add(name)
            log_lines.event(log, "model_not_listed", level=logging.WARNING, model=name)
