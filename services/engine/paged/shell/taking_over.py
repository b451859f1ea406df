"""This shell takes over prefixes from a rank that leaves, and hands over this rank's own prefixes.

TakeOver --> engine's thread: pages reserved --> a pull, as for a request --> published, cached
                `--busy, no room                   `--failed, cancelled--> given back, or in quarantine
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from services.engine.paged.sequence import Sequence
from services.engine.paged.shell import pulling
from services.engine.paged.shell.engine_thread import BeginTakeOver, EndTakeOver, ListIdle, Spell
from services.engine.paged.take_overs import Declined
from services.kv.hand_over import IdlePrefix
from services.values.rank import Plan, PullSource, TakenOver, TakeOver
from services.values.request import GenerationRequest, Pulled, SamplingParams

if TYPE_CHECKING:
    from services.engine.paged.shell.transferring_engine import TransferringEngine


class TakingOver:
    """It implements services.engine.base.HandsOver for an engine that was started."""

    def __init__(self, engine: "TransferringEngine") -> None:
        self._engine = engine

    async def take_over(self, asked: TakeOver) -> TakenOver:
        sampling, salt = SamplingParams(max_tokens=1), asked.cache_salt
        name = f"take-over-from-{asked.source.id}"
        request = GenerationRequest(name, asked.token_ids, sampling, cache_salt=salt, plan=Plan.LOCAL)
        seq, pulled = Sequence(request, 0), Pulled()
        ended: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        with self._engine.mailbox(seq) as mailbox:
            try:
                begin = partial(BeginTakeOver, seq, asked.idle_s, asked.protected_tokens)
                reserved = await self._engine.answer(begin)
                if isinstance(reserved, Declined):
                    pulled = Pulled(refused=reserved.word)
                else:
                    source = PullSource(asked.source, len(asked.token_ids))
                    within_s = min(asked.within_s, pulling.BOUNDS.most_s)
                    pulled = await self._engine.pulling.pull(seq, mailbox, reserved, source, within_s)
            finally:
                self._engine.post(EndTakeOver(seq, partial(_tell, ended)))
            held_tokens, room_tokens = await ended
        return TakenOver(
            held_tokens, room_tokens, pulled.tokens, pulled.bytes, pulled.refused, pulled.digested_pages
        )

    async def idle_prefixes(self) -> list[IdlePrefix]:
        return await self._engine.answer(ListIdle)

    async def spell(self, prefix: IdlePrefix) -> tuple[int, ...] | None:
        return await self._engine.answer(partial(Spell, prefix))


def _tell(ended: asyncio.Future[tuple[int, int]], answer: tuple[int, int]) -> None:
    if not ended.done():
        ended.set_result(answer)
