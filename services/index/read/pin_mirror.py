"""A router knows of these pins: of very many the newest.

    begin_listing --put, for each that etcd has--> end_listing: these, and no others

The watch does not remember which pins it has shown, for they may be millions. So a listing shows all of them
again, by their names, and of none that it has gone.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from services.index.pins import KnownPin


class PinMirror(Mapping[str, KnownPin]):
    """It maps keys.pin_name(conversation) to pins."""

    def __init__(self, max_pins: int) -> None:
        self._max_pins = max_pins
        self._pins: OrderedDict[str, KnownPin] = OrderedDict()  # They stand in the order of their revisions.
        self._listed: list[tuple[int, str, KnownPin]] | None = None  # It is a heap, the oldest first.

    def __repr__(self) -> str:
        return f"PinMirror(pins={len(self._pins)}, listing={self._listed is not None})"

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pins)

    def __getitem__(self, name: str) -> KnownPin:
        return self._pins[name]

    def put(self, name: str, pin: KnownPin) -> None:
        """Put a pin, in a listing once for each name; what is not known yet is when the listing ends."""
        if self._listed is not None:
            if name in self._pins:
                self._pins[name] = pin
            heapq.heappush(self._listed, (pin.revision, name, pin))
            if len(self._listed) > self._max_pins:
                heapq.heappop(self._listed)
            return
        self.remove(name)
        self._pins[name] = pin
        if len(self._pins) > self._max_pins:
            self._pins.popitem(last=False)

    def remove(self, name: str) -> None:
        self._pins.pop(name, None)

    def begin_listing(self) -> None:
        """Forget what a listing that was broken off has brought; the next will bring it."""
        self._listed = []

    def end_listing(self) -> None:
        assert self._listed is not None, "no listing has begun"
        self._pins = OrderedDict((name, pin) for _, name, pin in sorted(self._listed))
        self._listed = None
