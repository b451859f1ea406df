"""A transport that spoils what it writes: a bit of the first byte is another one when it has landed."""

import ctypes

from services.transfer.extents import pieces_of
from services.transfer.local import LocalTransport


class SpoilingTransport(LocalTransport):
    """Between ranks of this process. The first `spoils` writes of all its instances are spoilt."""

    spoils = 0

    def write(self, peer, moves):
        write = super().write(peer, moves)
        if SpoilingTransport.spoils > 0:
            SpoilingTransport.spoils -= 1
            pieces = pieces_of(moves, self._pools, self._peers[peer][1])
            ctypes.c_uint8.from_address(int(pieces.target[0, 0])).value ^= 4
        return write
