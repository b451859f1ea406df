"""A checkpoint may be given by its name on the Hugging Face hub: `--model=ORG/NAME`, or `ORG/NAME@REVISION`.

    a path that exists            as it is; a GGUF file from a directory of ours (gguf_directory.py)
    a short name that is known    its directory in our own cache (known_models.py); nobody is asked
    all of it in the local cache  the snapshot's directory; nobody is asked
    else                          downloaded into the cache, if there is a network and HF_HUB_OFFLINE is unset

Whoever reads `--model` resolves it once, where its flags have been read; processes that it starts get the
directory. The cache is where HF_HOME and HF_HUB_CACHE say.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from services.settings.known_models import cached_directory, gguf_of, known_model
from services.values.errors import ConfigError, Unavailable

T = TypeVar("T")

MODEL_HELP = (
    "directory of a checkpoint, a .gguf file, smollm2, or a name on the Hugging Face hub, ORG/NAME or "
    "ORG/NAME@REVISION"
)
_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:@([\w./-]+))?")
# No engine of ours reads these: they are other formats of the same weights.
_LEFT_OUT = ("original/*", "onnx/*", "metal/*", "*.gguf")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHTS, _INDEX = "*.safetensors", "model.safetensors.index.json"
_SETTINGS = {"model": "--model", "draft_model": "--draft-model", "directory": "DIRECTORY"}


@dataclass(frozen=True, slots=True)
class HubName:
    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """Return the name, or None for a path or for nothing that could be on the hub."""
    found = _NAME.fullmatch(text)
    return None if found is None or Path(text).exists() else HubName(found[1], found[2])


def resolved(config: T, *, weights: bool, tell: Callable[[str], None] = lambda what: None) -> T:
    """Return the config with directories for what names a checkpoint.

    A model that came from the hub is served under its name there, unless `model_name` says otherwise.
    `weights` says that they are needed, and not the tokenizer and the configuration alone. `tell` gets what
    takes a while, such as a download.

    Raises:
        ConfigError: There is no such checkpoint, or none for us.
        Unavailable: It is not in the cache, and the hub cannot be reached.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for setting, flag in _SETTINGS.items():
        text = str(values.get(setting) or "")
        if (found := _found(text, flag, weights, tell)) is not None:
            changes[setting] = type(values[setting])(found.directory)
            if setting == "model" and values.get("model_name") == "":
                changes["model_name"] = found.name
    return replace(config, **changes) if changes else config  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class _Found:
    directory: Path
    name: str  # It is served under this name.


def _found(text: str, flag: str, weights: bool, tell: Callable[[str], None]) -> _Found | None:
    if (name := hub_name(text)) is not None:
        return _Found(_directory(name, flag, weights, tell), name.repository)
    if (model := known_model(text)) is not None:
        return _Found(cached_directory(model, flag), model.name)
    try:
        if not text or (file := gguf_of(Path(text))) is None:
            return None
        # Its tokenizer's library is not needed for anything else here.
        from services.settings.gguf_directory import gguf_directory

        return _Found(gguf_directory(file), file.stem)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _directory(name: HubName, flag: str, weights: bool, tell: Callable[[str], None]) -> Path:
    from huggingface_hub import constants

    cached = _cached(name, flag)
    if cached is not None and (_has_weights(cached) if weights else (cached / "config.json").is_file()):
        return cached
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{_missing(name, flag, cached)}, and HF_HUB_OFFLINE is set")
    tell(f"downloading {name} from the Hugging Face hub into {constants.HF_HUB_CACHE}")
    directory = _download(name, flag, weights)
    if weights and not _has_weights(directory):
        raise ConfigError(f"{flag}: {name} on the hub has no weights in safetensors")
    return directory


def _cached(name: HubName, flag: str) -> Path | None:
    """Return the snapshot, whatever it holds. Raises ConfigError for a name that the hub would not take."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True))
    except FileNotFoundError:  # LocalEntryNotFoundError is one.
        return None
    except HFValidationError as error:  # It is a path, more likely.
        raise ConfigError(
            f"{flag}: there is no directory {name} here, and nothing on the hub may be called so"
        ) from error


def _has_weights(directory: Path) -> bool:
    """Say whether all of them are there: a download may have been cut."""
    index = directory / _INDEX
    if not index.is_file():
        return any(directory.glob(_WEIGHTS))
    files = set(json.loads(index.read_text())["weight_map"].values())
    return all((directory / file).is_file() for file in files)


def _download(name: HubName, flag: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = [*_SMALL, _WEIGHTS] if weights else [*_SMALL]
    try:
        return Path(
            snapshot_download(
                name.repository, revision=name.revision, allow_patterns=wanted, ignore_patterns=[*_LEFT_OUT]
            )
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{flag}: {name} is gated: accept its terms on the hub, and set HF_TOKEN to a token of yours"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(
            f"{flag}: there is no directory {name} here, and nothing of that name on the hub"
            " (a private one needs HF_TOKEN)"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise Unavailable(f"{_missing(name, flag, None)}, and the hub cannot be reached: {why}") from error


def _missing(name: HubName, flag: str, cached: Path | None) -> str:
    from huggingface_hub import constants

    if cached is not None:
        return f"{flag}: {name} is in the cache in part only ({cached})"
    where = constants.HF_HUB_CACHE
    return f"{flag}: there is no directory {name} here, it is not in the Hugging Face cache ({where})"
