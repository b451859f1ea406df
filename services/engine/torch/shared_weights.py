"""Weights lie in files that are mapped, so that ranks of one machine hold them once.

A file is named after what is in it, and compared with it byte by byte before it is used: whoever made it, and
whatever became of it since, a rank computes with its own checkpoint's numbers. Where there is no room on the
disk, or no right to write, a rank keeps its weights to itself as it does without.

The mapping is private and writable, since numba compiles other code for arrays that cannot be written; nobody
writes, so the kernel's page cache is all there is of it, and it is given up where memory is short.
"""

import logging
import mmap
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_KEPT_S = 7 * 24 * 3600.0  # A file that nobody has asked for so long is removed.
_UNFINISHED = "unfinished-"  # a file is being written; whoever writes it may be killed
_WRITTEN_S = 3600.0  # after this nobody writes any more
_LEFT_FREE_BYTES = 2 << 30  # so much of the disk is left free
_FEWEST_BYTES = 1 << 20  # a tensor that is no linear layer's and smaller is copied


class SharedWeights:
    def __init__(self, folder: Path | None = None) -> None:
        """Use `folder`, or one below the user's cache where it is None.

        Files that nobody has asked for in a week are removed, and those that nobody finished in an hour.
        """
        self._usable = True
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
            self._folder = folder or cache.expanduser() / "isthmus" / "weights"
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._folder.iterdir():
                kept_s = _WRITTEN_S if path.name.startswith(_UNFINISHED) else _KEPT_S
                with suppress(FileNotFoundError):  # others make and remove some meanwhile
                    if path.stat().st_mtime < time.time() - kept_s:
                        path.unlink()
        except (OSError, RuntimeError) as error:  # there may be no home
            self._give_up(error)

    def shared(self, content: Bytes) -> Bytes:
        if not self._usable or not content.size:
            return content
        path = self._folder / f"{xxhash.xxh3_128(content.data).hexdigest()}-{content.size}"
        try:
            found = self._found(path, content)
            return self._made(path, content) if found is None else found
        except OSError as error:
            self._give_up(error)
            return content

    def _found(self, path: Path, content: Bytes) -> Bytes | None:
        """Return the file's bytes; a file that is not what its name says is removed."""
        with suppress(FileNotFoundError):
            os.utime(path)
            if path.stat().st_size == content.size and np.array_equal(mapped := _mapped(path), content):
                return mapped
            log.warning("shared_weights_differ path=%s", path)
            path.unlink(missing_ok=True)
        return None

    def _made(self, path: Path, content: Bytes) -> Bytes:
        if shutil.disk_usage(self._folder).free - content.size < _LEFT_FREE_BYTES:
            raise OSError(f"the disk of {self._folder} is nearly full")
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_UNFINISHED) as file:
            content.tofile(file)
            file.flush()
            with suppress(FileExistsError):  # of ranks that start at once the first one's file is everybody's
                os.link(file.name, path)
        found = self._found(path, content)
        return content if found is None else found

    def _give_up(self, error: Exception) -> None:
        self._usable = False
        log.warning("weights_not_shared error=%r", str(error))


def share_parameters(module: nn.Module, weights: SharedWeights) -> None:
    """Put what is left of the module's weights into such files, too, and nothing into the checkpoint's own.

    The checkpoint's file stays mapped, whole, for as long as a single tensor lies there.
    """
    with torch.no_grad():
        for parameter in (*module.parameters(), *module.buffers()):
            if parameter.device.type != "cpu" or not parameter.numel():
                continue
            if parameter.nbytes < _FEWEST_BYTES:
                parameter.data = parameter.data.clone()
                continue
            content = parameter.data.contiguous().view(-1).view(torch.uint8).numpy()
            shared = torch.from_numpy(weights.shared(content))
            parameter.data = shared.view(parameter.dtype).view(parameter.shape)


def _mapped(path: Path) -> Bytes:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
