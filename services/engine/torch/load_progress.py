"""How far transformers is with a model's weights, in the log: nobody should wonder for minutes."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

log = logging.getLogger(__name__)

_EVERY_S = 2.0


@contextmanager
def telling(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """`weights_loading done=120 of=290`, every two seconds, while transformers goes through them. One model
    at a time: the hook is the process's."""
    before = set_tqdm_hook(lambda make, arguments, fields: told(make(*arguments, **fields), arguments, clock))
    try:
        yield
    finally:
        set_tqdm_hook(before)


def told(bar: Any, arguments: tuple[Any, ...], clock: Callable[[], float]) -> Any:
    """The bar, which goes through its items; what is no loop over a known number of them is left alone."""
    total = len(arguments[0]) if arguments and hasattr(arguments[0], "__len__") else 0
    return _Telling(bar, total, clock) if total else bar


class _Telling:
    """As the bar is used: it is gone through, or asked for what a bar has."""

    def __init__(self, bar: Any, total: int, clock: Callable[[], float]) -> None:
        self._bar, self._total, self._clock = bar, total, clock

    def __iter__(self) -> Iterator[Any]:
        said_s = self._clock()
        for done, item in enumerate(self._bar):
            if (now := self._clock()) - said_s >= _EVERY_S:
                said_s = now
                log.info("weights_loading done=%d of=%d", done, self._total)
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
