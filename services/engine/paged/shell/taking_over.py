"""This shell takes over prefixes from a rank that leaves, and hands over this rank's own prefixes.

TakeOver --> engine's thread: pages reserved --> a pull, as for a request --> published, cached
                `--busy, no room                   `--failed, cancelled--> given back, or in quarantine
"""

from functools import partial
from typing import TYPE_CHECKING

from services.engine.paged.core import EngineCore
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell import pulling
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
        with self._engine.mailbox(seq) as mailbox:
            try:
                reserved = await self._engine.ask(
                    lambda core: core.pulls.taking.begin(seq, asked.idle_s, asked.protected_tokens)
                )
                if isinstance(reserved, Declined):
                    pulled = Pulled(refused=reserved.word)
                else:
                    source = PullSource(asked.source, len(asked.token_ids))
                    within_s = min(asked.within_s, pulling.BOUNDS.most_s)
                    pulled = await self._engine.pulling.pull(seq, mailbox, reserved, source, within_s)
            finally:
                ended = self._engine.ask(partial(_end, seq))
            held_tokens, room_tokens = await ended
        return TakenOver(
            held_tokens, room_tokens, pulled.tokens, pulled.bytes, pulled.refused, pulled.digested_pages
        )

    async def idle_prefixes(self) -> list[IdlePrefix]:
        return await self._engine.ask(lambda core: core.pulls.taking.list_idle())

    async def spell(self, prefix: IdlePrefix) -> tuple[int, ...] | None:
        return await self._engine.ask(lambda core: core.pulls.taking.spell(prefix))


def _end(seq: Sequence, core: EngineCore) -> tuple[int, int]:
    """End the sequence; return the tokens that are held here now, and those for which there is space."""
    taking = core.pulls.taking
    taking.end(seq)
    return taking.held_tokens(seq), taking.room_tokens(seq)
