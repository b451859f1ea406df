"""Which of the answers to one prompt has it computed, and where the others go then.

lead -> placed anywhere -> held -> the others are placed at the holder
  ^           |             |
  |           +- left       +-- lost, with its rank: one of those that were there leads
  +-----------+

The holder's radix tree has the prompt's pages once, and each answer locks them. What an answer computes of
the prompt beside that is what the tree cannot give: a page at most, or what is behind the last resume point.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from services.router.cluster import HashedPrompt
from services.values.rank import RankId


class PromptTurns:
    """Of one request, on its router's loop. Answers are named by their index."""

    def __init__(self) -> None:
        self.prompt: HashedPrompt | None = None  # without any answer, once somebody has hashed it
        self._holders: list[RankId] = []
        self._leader: int | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PromptTurns leader={self._leader} holders={[str(rank) for rank in self._holders]}>"

    def holders(self, excluded: Collection[RankId]) -> list[RankId]:
        """Decode ranks that hold the prompt, as they said of an answer of ours."""
        return [rank for rank in self._holders if rank not in excluded]

    def lead(self, index: int) -> bool:
        """Whether this answer is the one that has the prompt computed; if nobody was, it is now."""
        if self._leader is None:
            self._leader = index
        return self._leader == index

    async def changed(self, timeout_s: float) -> None:
        """Returns when all are to look again, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def held(self, index: int, rank: RankId) -> None:
        """The rank holds the prompt, for this answer."""
        if rank not in self._holders:
            self._holders.append(rank)
        self.leave(index)

    def lost(self, rank: RankId) -> None:
        """It failed an answer: what it holds is not asked for again."""
        if rank in self._holders:
            self._holders.remove(rank)

    def leave(self, index: int) -> None:
        """This answer has nothing computed any more."""
        if self._leader == index:
            self._leader = None
        self.look()

    def look(self) -> None:
        """All that wait are to look again."""
        self._changed.set()
        self._changed = asyncio.Event()
