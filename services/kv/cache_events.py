"""A ledger has the blocks stored and removed since last asked: the two of the same block cancel out.

A radix tree has one, a rank's checkpoints have one, and so has a tree that SGLang tells of.
"""

from services.values.kv import BlockHash


class BlockLedger:
    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}  # True says that it was stored.

    def note(self, block: BlockHash, *, stored: bool) -> None:
        if self._changes.get(block, stored) != stored:
            del self._changes[block]  # The opposite had not been taken yet.
        else:
            self._changes[block] = stored

    def take(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return (stored, removed) since the last call, each in the order in which it happened."""
        if not self._changes:  # This holds after most steps.
            return (), ()
        changes, self._changes = self._changes, {}
        stored = tuple(block for block, is_stored in changes.items() if is_stored)
        return stored, tuple(block for block, is_stored in changes.items() if not is_stored)
