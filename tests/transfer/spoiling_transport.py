"""A transport that spoils what it writes: a bit of the first byte is another one when it has landed."""

import ctypes

from services.transfer.local import LocalTransport
from services.transfer.transport import pieces_of


class SpoilingTransport(LocalTransport):
    """Between ranks of this process. Of the writes of all its instances the first `spoils` that move units of
    `group` are spoilt, in the first of those."""

    spoils = 0
    group = 0

    def write(self, peer, moves):
        write = super().write(peer, moves)
        moves = [move for move in moves if move.group == SpoilingTransport.group]
        if SpoilingTransport.spoils > 0 and moves:
            SpoilingTransport.spoils -= 1
            pieces = pieces_of(moves, self._pools, self._peers[peer][1])
            ctypes.c_uint8.from_address(int(pieces.target[0, 0])).value ^= 4
        return write
