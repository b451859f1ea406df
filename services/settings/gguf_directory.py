"""A GGUF file that is given as a model is served from a directory of our cache,
`$XDG_CACHE_HOME/isthmus/gguf`.

It has the configuration, tokenizer and chat template in transformers' format, and a link to the file, whose
weights engine torch reads directly. Nothing is copied.
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

# Increase this when this code writes something else, so that directories are written again.
_VERSION = 2
# Such models are trained in half precision. On a CPU without it an error names --dtype.
_DTYPE = "bfloat16"


def gguf_directory(file: Path) -> Path:
    """Return the directory, and write it if the file is new. Raises ConfigError if the file cannot be read,
    has an unsupported model, or the directory cannot be written."""
    try:
        stat = file.stat()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isthmus" / "gguf"
        directory = cache / f"{file.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{_VERSION}"
        link = directory / GGUF_LINK
        if not (link.exists() and link.samefile(file)):
            _write(file.resolve(), directory)
        return directory
    except (OSError, RuntimeError) as error:  # There may be no home directory.
        raise ConfigError(f"{file} cannot be prepared to be served: {error}") from error


def mapped(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError means that the file is empty.
        raise ConfigError(f"{file} cannot be read: {error}") from error


def write_configs(model: GgufModel, directory: Path) -> None:
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
        if directory.exists():  # The directory belongs to another file of that name, or its link is broken.
            shutil.rmtree(directory, ignore_errors=True)
        with suppress(FileExistsError, IsADirectoryError):
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
