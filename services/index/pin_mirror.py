"""The pins that a router has been told of: of very many the newest.

    begin_listing --put, for each that etcd has--> end_listing: those that were not put have gone

The watch does not remember which pins it has told, for they may be millions. So a listing tells all of them
again, and of none that it has gone.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from services.index.pins import KnownPin


class PinMirror(Mapping[str, KnownPin]):
    """By keys.pin_name(conversation)."""

    def __init__(self, max_pins: int) -> None:
        self._max_pins = max_pins
        self._pins: OrderedDict[str, KnownPin] = OrderedDict()
        self._unlisted = 0  # so many, from the oldest on, the present listing has not told yet

    def __repr__(self) -> str:
        return f"PinMirror(pins={len(self._pins)}, unlisted={self._unlisted})"

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pins)

    def __getitem__(self, name: str) -> KnownPin:
        return self._pins[name]

    def put(self, name: str, pin: KnownPin) -> None:
        """In a listing once for each name."""
        self.remove(name)
        self._pins[name] = pin
        if len(self._pins) > self._max_pins:
            self._drop_oldest()

    def remove(self, name: str) -> None:
        if self._pins.pop(name, None) is not None:
            self._unlisted = max(0, self._unlisted - 1)

    def begin_listing(self) -> None:
        """A listing that was broken off counts for nothing."""
        self._unlisted = len(self._pins)

    def end_listing(self) -> None:
        while self._unlisted:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._pins.popitem(last=False)
        self._unlisted = max(0, self._unlisted - 1)
