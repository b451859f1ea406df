"""This module puts weights into mapped files, so that the ranks of one machine hold one copy of them.

A file's name is the digest of its content, and a rank compares the two byte by byte before it uses the file.
So a rank computes with its own checkpoint's numbers, whoever wrote the file and whatever changed it since.
Without room on the disk, or without the right to write, a rank keeps its weights in its own memory.

The mapping is private and writable, since numba compiles other code for arrays that are read-only. Nobody
writes to it, so its only copy is in the kernel's page cache, which drops it when memory is short.
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

_KEPT_S = 7 * 24 * 3600.0  # A file that no rank has opened for so long is removed.
_UNFINISHED = "unfinished-"  # A file with this prefix is being written, by a process that may be killed.
_WRITTEN_S = 3600.0  # No writer takes so long.
_LEFT_FREE_BYTES = 2 << 30  # So much of the disk stays free.
_FEWEST_BYTES = 1 << 20  # A smaller tensor that belongs to no linear layer is copied.


class SharedWeights:
    def __init__(self, folder: Path | None = None) -> None:
        """Use `folder`, or with None one below the user's cache.

        This removes files that nobody has opened for a week, and unfinished ones after an hour.
        """
        self._usable = True
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
            self._folder = folder or cache.expanduser() / "isthmus" / "weights"
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._folder.iterdir():
                kept_s = _WRITTEN_S if path.name.startswith(_UNFINISHED) else _KEPT_S
                with suppress(FileNotFoundError):  # Other processes create and remove files meanwhile.
                    if path.stat().st_mtime < time.time() - kept_s:
                        path.unlink()
        except (OSError, RuntimeError) as error:  # The user may have no home directory.
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
        """Return the file's bytes, or None; a file whose content differs from its name is removed."""
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
            # Where several ranks start at once, all use the first one's file.
            with suppress(FileExistsError):
                os.link(file.name, path)
        found = self._found(path, content)
        return content if found is None else found

    def _give_up(self, error: Exception) -> None:
        self._usable = False
        log.warning("weights_not_shared error=%r", str(error))


def share_parameters(module: nn.Module, weights: SharedWeights) -> None:
    """Put the module's other weights into such files, too, so that none stays in the checkpoint's file.

    The checkpoint's file stays mapped as a whole for as long as a single tensor lies there.
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
