"""A GGUF file that is given as a model is served from a directory of our cache.

There are its configuration, tokenizer and chat template as transformers keeps them, and a link to the file,
whose weights engine torch reads as they are: `$XDG_CACHE_HOME/isthmus/gguf`. Nothing is copied.
"""

import json
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from services.model.gguf import read_gguf
from services.model.gguf_model import GgufModel, model_of
from services.settings.named_models import GGUF_LINK
from services.values.errors import ConfigError

# What is written depends on this code, too: a newer one writes anew.
_VERSION = 2
# Half precision is what such models are made in. A CPU without instructions for it says so, and --dtype.
_DTYPE = "bfloat16"


def gguf_directory(file: Path) -> Path:
    """Return the directory, which is written when the file is new.

    Raises ConfigError where the file cannot be read or is of a model that is not, or nothing can be written.
    """
    try:
        stat = file.stat()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isthmus" / "gguf"
        directory = cache / f"{file.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{_VERSION}"
        link = directory / GGUF_LINK
        if not (link.exists() and link.samefile(file)):
            _write(file.resolve(), directory)
        return directory
    except (OSError, RuntimeError) as error:  # there may be no home
        raise ConfigError(f"{file} cannot be prepared to be served: {error}") from error


def mapped(file: Path) -> mmap.mmap:
    """Return the file's bytes. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError says that it is empty.
        raise ConfigError(f"{file} cannot be read: {error}") from error


def write_configs(model: GgufModel, directory: Path) -> None:
    """Write all but the weights. Raises OSError."""
    for name, content in model.configs.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(model.tokenizer)


def _write(file: Path, directory: Path) -> None:
    with mapped(file) as data:
        try:
            model = model_of(read_gguf(data), data, _DTYPE)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".partial-"))
    try:
        write_configs(model, partial)
        (partial / GGUF_LINK).symlink_to(file)
        if directory.exists():  # It is of another file of that name, or its link leads nowhere any more.
            shutil.rmtree(directory, ignore_errors=True)
        with suppress(FileExistsError, IsADirectoryError):
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
