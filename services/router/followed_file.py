"""A file of a flag is read again when it has changed, and each of its problems is logged once."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from services.observe import log_lines
from services.values.errors import ConfigError

_T = TypeVar("_T")
log = logging.getLogger(__name__)


class FollowedFile(Generic[_T]):
    """`content` is what `parse` made of the file when it could be read last, and `problem` says why it cannot
    be read now. Errors name the `flag`. The constructor raises ConfigError, as `parse` may."""

    def __init__(
        self,
        flag: str,
        path: Path,
        parse: Callable[[str], _T],
        *,
        unreadable: str,
        encoding: str = "utf-8",
    ) -> None:
        self.path = path
        self.problem = ""
        self._flag = flag
        self._parse = parse
        self._unreadable = unreadable  # This is the event that is logged.
        self._encoding = encoding
        self._stamp = self._new_stamp()
        self.content = self._read()

    def is_new(self) -> bool:
        """Read the file if it was replaced, or could not be read before. Return whether it was read."""
        stamp = self._new_stamp()
        if stamp is not None and stamp == self._stamp:
            return False
        try:
            self.content, self._stamp, self.problem = self._read(), stamp, ""
        except ConfigError as error:
            self._stamp = None
            if str(error) != self.problem:
                log_lines.event(log, self._unreadable, level=logging.ERROR, error=str(error))
            self.problem = str(error)
            return False
        return True

    def _read(self) -> _T:
        try:
            return self._parse(self.path.read_text(encoding=self._encoding))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._flag}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{self._flag}: {self.path}: {error}") from error

    def _new_stamp(self) -> tuple[int, int, int] | None:
        """Return what differs after the file was replaced, or None where there is none."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
