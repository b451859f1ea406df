"""The pins of all routers, as etcd holds them: their life, and how late the other routers see them.

They are kept by PinWriter's rules in virtual time: written when a conversation moves, and again when half of
the life is over; gone when it is. A writer sees its own at once.
"""

from dataclasses import dataclass

from services.index.pins import PinSettings
from services.router.replay.events import Events
from services.values.rank import RankKey

_SETTINGS = PinSettings()


@dataclass(frozen=True, slots=True)
class _Pin:
    rank: RankKey
    written_s: float
    seen_s: float  # by the other routers
    router: int


class Pins:
    """`staleness_s`: from etcd to a router."""

    def __init__(self, events: Events, staleness_s: float) -> None:
        self._events = events
        self._delay_s = _SETTINGS.gather_s + staleness_s
        self._pins: dict[str, list[_Pin]] = {}  # the last two of a conversation

    def of(self, conversation: str, router: int) -> RankKey | None:
        pin = self._seen(conversation, router)
        return None if pin is None else pin.rank

    def pin(self, conversation: str, rank: RankKey, router: int) -> None:
        last, now = self._seen(conversation, router), self._events.now
        if last is not None and last.rank == rank and now - last.written_s < _SETTINGS.life_s / 2:
            return
        pins = self._pins.setdefault(conversation, [])
        pins.append(_Pin(rank, now, now + self._delay_s, router))
        del pins[:-2]

    def _seen(self, conversation: str, router: int) -> _Pin | None:
        now = self._events.now
        for pin in reversed(self._pins.get(conversation, ())):
            if pin.router == router or pin.seen_s <= now:
                return pin if now - pin.written_s < _SETTINGS.life_s else None
        return None
