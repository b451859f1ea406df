"""Whether the loops that carry the Handshake, in SGLang's processes, run. They tell every few seconds.

Counted in looks, as everywhere: whoever looks may have stood still itself. SGLang watches its schedulers
(`--watchdog-timeout`); of our thread beside them it knows nothing, and its rooms would wait for ever.
"""

import asyncio

BEAT_S = 5.0
_LOOK_S = 1.0
_SILENT_LOOKS = 60  # as long as a supervisor waits for a rank


class Beats:
    def __init__(self) -> None:
        self._looks: dict[int, int] = {}  # by pid, since it was heard of

    def heard(self, pid: int) -> None:
        self._looks[pid] = 0

    def look(self) -> list[int]:
        """Those that were heard of, and are no more."""
        self._looks = {pid: looks + 1 for pid, looks in self._looks.items()}
        return [pid for pid, looks in self._looks.items() if looks >= _SILENT_LOOKS]

    async def until_silent(self) -> list[int]:
        """Returns who was heard of and is no more."""
        while not (silent := self.look()):
            await asyncio.sleep(_LOOK_S)
        return silent
