"""PromptTurns say which of the answers to one prompt has it computed, and where the others go then.

lead -> placed anywhere -> held -> the others are placed at the holder
  ^           |             |
  |           +- left       +-- lost, with its rank: one of those that were there leads
  +-----------+

The holder's radix tree has the prompt's pages once, and each answer locks them. What an answer computes of
the prompt beside that is what the tree cannot give: a page at most, or what is behind the last checkpoint.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from services.router.cluster import HashedPrompt
from services.values.rank import RankId


class PromptTurns:
    """They are one request's, on its router's loop. Answers are named by their index."""

    def __init__(self) -> None:
        self.prompt: HashedPrompt | None = None  # it has no output; set once somebody has hashed it
        self._holders: list[RankId] = []
        self._leader: int | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PromptTurns leader={self._leader} holders={[str(rank) for rank in self._holders]}>"

    def holders(self, excluded: Collection[RankId]) -> list[RankId]:
        return [rank for rank in self._holders if rank not in excluded]

    def lead(self, index: int) -> bool:
        """Return whether this answer is the one that has the prompt computed; if nobody was, it is now."""
        if self._leader is None:
            self._leader = index
        return self._leader == index

    async def changed(self, timeout_s: float) -> None:
        """Return when all are to look again, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def held(self, index: int, rank: RankId) -> None:
        if rank not in self._holders:
            self._holders.append(rank)
        self.leave(index)

    def lost(self, rank: RankId) -> None:
        """Note that the rank failed an answer: the others do not go there for the prompt any more."""
        if rank in self._holders:
            self._holders.remove(rank)

    def leave(self, index: int) -> None:
        if self._leader == index:
            self._leader = None
        self.look()

    def look(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
