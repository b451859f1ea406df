"""A transport that spoils what it writes: a bit of the first byte is another one when it has landed."""

import ctypes

from services.transfer.extents import extents_of
from services.transfer.local import LocalTransport


class SpoilingTransport(LocalTransport):
    """Between ranks of this process. The first `spoils` writes of all its instances are spoilt."""

    spoils = 0

    def write(self, peer, moves):
        write = super().write(peer, moves)
        if SpoilingTransport.spoils > 0:
            SpoilingTransport.spoils -= 1
            _, targets = extents_of(moves, self._memory, self._peers[peer][1], self._page_bytes)
            ctypes.c_uint8.from_address(int(targets[0, 0])).value ^= 4
        return write
