"""This shell asks sources for the prefixes of prompts that they hold, and grants other ranks the same.

It also takes prefixes over from a rank that leaves, and hands over this rank's own.

    Pulling.pull(seq) --PullRequest--> source             Lending.requested <--PullRequest-- another rank
       <--PullGrant, or refused--                            engine's thread: granted --> sender's transfer
       --KvTicket--> ... <--landed, failed--                 sender's thread: PullGrant, then as any transfer
       engine's thread: published, or computed               its end --> engine's thread: unlocked

The states of a pull are in kv/handshake.py. A pull, its request included, may take half of the time that
computing would take. Its grant may take a second of that, and the writes a quarter of a second in any case.
So nobody needs to know the way to a source, nor its speed.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Reserved
from services.engine.paged.pulls import Refused
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.delta import Delta
from services.engine.paged.take_overs import Declined
from services.kv.hand_over import IdlePrefix
from services.kv.handshake import PullEffect, PullEvent, PullState, step_pull
from services.transfer.receiving.sender_links import PullRefused, SenderConnections, SenderLink
from services.transfer.receiving.transfer_watch import TransferWatch
from services.transfer.sending.sender import KvSender
from services.transfer.sending.sending_transfer import TransferEnd
from services.transfer.waits import both, within
from services.values.errors import IsthmusError, KvCorrupt, PeerFailed, ProtocolError
from services.values.kv import PullGrant, PullRequest
from services.values.rank import Plan, PullSource, RankId, TakenOver, TakeOver, TransferId
from services.values.request import GenerationRequest, Pulled, SamplingParams

if TYPE_CHECKING:
    from services.engine.paged.shell.paged_engine import Mailbox
    from services.engine.paged.shell.transferring_engine import TransferringEngine

log = logging.getLogger(__name__)

# After a pull is given up, its source has so long to report that it writes no more. Then the pages are
# replaced, which costs nothing but a quarantine.
_LAST_WORD_S = 0.05
# A ticket follows its grant within a round trip and one step of the rank that pulls.
_MOST_KEPT_S = 5.0
_KEPT_EVERY_S = 0.05  # A rank that leaves looks this often whether its tier has stored all.


@dataclass(frozen=True, slots=True)
class PullBounds:
    of_computing: float = 0.5  # It is a share of the time to compute, where that is known.
    least_s: float = 0.25
    unknown_s: float = 2.0
    most_s: float = 30.0
    grant_s: float = 1.0

    def limit_s(self, tokens: int, tokens_per_s: float) -> float:
        if tokens_per_s <= 0:
            return self.unknown_s
        return min(self.most_s, max(self.least_s, self.of_computing * tokens / tokens_per_s))


BOUNDS = PullBounds()


class Pulling:
    """An engine pulls from sources through this. All methods are called on the engine's loop."""

    def __init__(self, engine: "TransferringEngine", links: SenderConnections) -> None:
        self.engine = engine
        self.links = links

    async def pull(
        self,
        seq: Sequence,
        mailbox: "Mailbox",
        reserved: Reserved,
        source: PullSource,
        limit_s: float | None = None,
    ) -> Pulled:
        """Have the source write what the sequence lacks. Then the sequence computes, whether this succeeded
        or not.

        Without a `limit_s` the time is limited by what computing would take. Raise what the sequence fails
        with meanwhile.
        """
        pull = _Pull(self, seq, reserved, source, limit_s)
        try:
            await both(pull.run(), _nothing(), pull.attend(mailbox))
        except BaseException:
            pull.step(PullEvent.CANCELLED)
            raise
        return pull.told


class _Pull:
    def __init__(
        self,
        pulling: Pulling,
        seq: Sequence,
        reserved: Reserved,
        source: PullSource,
        limit_s: float | None,
    ) -> None:
        assert reserved.wanted is not None
        self._engine = pulling.engine
        self._links = pulling.links
        self._seq = seq
        self._source = source
        self._reserved = reserved
        self._wanted = reserved.wanted
        self._given_limit_s = limit_s
        self._limit_s = self._limit_up_to(self._wanted.expected_end)
        self._grant_s = min(BOUNDS.grant_s, self._limit_s)
        self._transfer_id = TransferId(secrets.randbits(64))
        self._state = PullState.ASKED
        self._link: SenderLink | None = None
        self._grant: PullGrant | None = None
        self._delta: Delta | None = None
        self._reserved_again: asyncio.Queue[Reserved] = asyncio.Queue()
        self._began = time.monotonic()
        self.told = Pulled()

    def __repr__(self) -> str:
        return f"_Pull({self._transfer_id:016x} from {self._source.rank.id} {self._state.name})"

    def _limit_up_to(self, end: int) -> float:
        if self._given_limit_s is not None:
            return self._given_limit_s
        return BOUNDS.limit_s(end - self._wanted.resumes_at, self._engine.load().prefill_tokens_per_s)

    @property
    def _left_s(self) -> float:
        """Return how long the granted writes may take: the rest of the time limit, or the least bound."""
        left_s = self._limit_s - (time.monotonic() - self._began)
        return max(left_s, min(BOUNDS.least_s, self._limit_s))

    async def run(self) -> None:
        try:
            grant = await within(self._grant_s, self._ask())
            if grant.end != self._wanted.expected_end:
                await self._reserve_up_to(grant.end)
        except TimeoutError:
            self._fail(PullEvent.LATE, "late", "no grant came in time")
        except PullRefused as refused:
            self.told = replace(self.told, held_tokens=refused.held_tokens)
            self._fail(PullEvent.REFUSED, refused.word, str(refused))
        except ProtocolError as error:
            self._fail(PullEvent.LATE, "failed", str(error))
        except IsthmusError as error:
            self._fail(PullEvent.REFUSED, "gone", str(error))
        else:
            await self._fill(grant)

    async def _ask(self) -> PullGrant:
        self._link = link = await self._links.link(self._source.rank)
        wanted, seq = self._wanted, self._seq
        request = PullRequest(
            self._transfer_id,
            self._source.rank.id.generation,
            seq.request.kv_scope,
            tuple(seq.ids[: wanted.end]),
            self._reserved.prefix_len,
            wanted.resumes_at + 1,
            link.write_until_s(self._grant_s + _MOST_KEPT_S),
        )
        grant = await link.ask(request)
        if link.layout.draft is None:  # The two ranks have different draft models, or one has none.
            grant = replace(grant, with_draft=False)
        self._engine.check_granted_end(grant.end, wanted)
        self.told = replace(self.told, held_tokens=grant.end)
        return grant

    async def _reserve_up_to(self, end: int) -> None:
        if self._reserved.carried:
            self._engine.post(lambda core: core.pulls.up_to(self._seq, end))
            # The engine's thread answers between two steps, and no other event may come after this command.
            self._reserved = await self._reserved_again.get()

    async def _fill(self, grant: PullGrant) -> None:
        assert self._link is not None
        if not self._link.alive:
            self._fail(PullEvent.REFUSED, "gone", "the stream to the source was lost")
            return
        self._grant = grant
        self._limit_s = self._limit_up_to(grant.end)  # The granted end may differ from the expected one.
        self.step(PullEvent.GRANTED)
        assert self._delta is not None
        left_s = self._left_s
        try:
            landed, digested = await within(left_s, self._delta.landed_as_written())
        except TimeoutError:
            self._fail(PullEvent.LATE, "late", f"it has not landed in {left_s:.2f} s")
        except KvCorrupt as error:
            self._fail(PullEvent.STOPPED, "corrupt", str(error))
        except PeerFailed as error:
            stopped = self._delta.watch.is_over(self._engine.lease.fence_margin_s)
            word = "failed" if self._link.alive else "gone"
            self._fail(PullEvent.STOPPED if stopped else PullEvent.DOUBTED, word, str(error))
        else:
            tokens = grant.end - self._wanted.resumes_at
            came = replace(self.told, tokens=tokens, bytes=landed.bytes_moved, digested_pages=digested)
            self.told = came
            self.step(PullEvent.LANDED)
        if self._state is PullState.STOPPING:
            await self._await_last_word(self._delta)

    async def _await_last_word(self, delta: Delta) -> None:
        stopped = delta.watch.writer_stopped(self._engine.lease.fence_margin_s)
        try:
            await within(_LAST_WORD_S, stopped)
        except TimeoutError:
            self.step(PullEvent.LATE)
        else:
            self.step(PullEvent.STOPPED)

    def _fail(self, event: PullEvent, word: str, reason: str) -> None:
        log.info("kv_pull_failed source=%s word=%s reason=%r", self._source.rank.id, word, reason)
        self.told = replace(self.told, refused=word)
        self.step(event)

    def step(self, event: PullEvent) -> None:
        # The sequence may compute as soon as the effects are posted, and that is no time of the pull.
        self.told = replace(self.told, seconds=time.monotonic() - self._began)
        self._state, effects = step_pull(self._state, event)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: PullEffect) -> None:
        match effect:
            case PullEffect.SEND_TICKET:
                self._send_ticket()
            case PullEffect.END_GRANT:
                if self._link is not None:
                    self._link.end_grant(self._transfer_id)
            case PullEffect.GIVE_UP:
                assert self._delta is not None
                self._delta.watch.abort()
            case PullEffect.PUBLISH:
                assert self._grant is not None
                end, with_draft = self._grant.end, self._grant.with_draft
                self._engine.post(lambda core: core.pulls.landed(self._seq, end, with_draft=with_draft))
            case PullEffect.SET_ASIDE:
                assert self._grant is not None and self._delta is not None
                self._set_aside(self._grant.end, self._delta.watch)
            case PullEffect.COMPUTE:
                self._engine.post(lambda core: core.pulls.failed(self._seq))

    def _set_aside(self, end: int, watch: TransferWatch) -> None:
        engine, seq, transfer_id = self._engine, self._seq, self._transfer_id
        engine.post(lambda core: core.pulls.set_aside(seq, transfer_id, end))
        engine.when_stopped(watch, lambda: engine.post(lambda core: core.pulls.end_aside(transfer_id)))

    def _send_ticket(self) -> None:
        assert self._grant is not None and self._link is not None
        end, page_size = self._grant.end, self._engine.layout.page_size
        start = min(self._reserved.prefix_len, end)
        layout = self._link.layout if self._grant.with_draft else replace(self._link.layout, draft=None)
        engine, transfer_id = self._engine, self._transfer_id
        delta = Delta(engine, self._seq.request.request_id, self._link, layout, transfer_id)
        self._delta = delta
        pages = self._reserved.delta_pages[: (end - start) // page_size]
        delta.send_ticket(start, end, pages, self._reserved.carried)

    async def attend(self, mailbox: "Mailbox") -> None:
        """Renew the lease from time to time. Raise what the sequence fails with meanwhile."""
        while True:
            try:
                async with asyncio.timeout(self._engine.lease.renew_every_s):
                    event = await mailbox.get()
            except TimeoutError:
                if self._delta is not None and self._state is PullState.FILLING:
                    self._delta.renew()
            else:
                if not isinstance(event, Reserved):
                    raise ProtocolError(f"{event!r} came before the source was done with")
                self._reserved_again.put_nowait(event)


async def _nothing() -> None:
    """A pull has no second leg."""


class Lending:
    """An engine grants others the prefixes that its core holds, and has its sender write them.

    `requested` is called on the loop, the other methods on the engine's and the sender's threads.
    """

    def __init__(self, engine: "TransferringEngine", sender: KvSender, own_id: RankId) -> None:
        self._engine = engine
        self._sender = sender
        self._own_id = own_id

    def requested(self, link_id: int, puller: RankId, request: PullRequest) -> None:
        if request.holder_generation != self._own_id.generation or self._engine.is_stopping:
            self._sender.refuse_pull(link_id, request.transfer_id, "gone")
            return
        self._engine.post(partial(self._grant, link_id, puller, request))

    def _grant(self, link_id: int, puller: RankId, request: PullRequest, core: EngineCore) -> None:
        transfer_id, sender = request.transfer_id, self._sender
        answer = core.pulls.grant(transfer_id, request.token_ids, request.cache_salt, request.least_end)
        if answer is None:  # The transfer has its grant already.
            return
        if isinstance(answer, Refused):
            sender.refuse_pull(link_id, transfer_id, answer.word, answer.held_tokens)
            return
        patience_s = min(_MOST_KEPT_S, request.keep_until_s - sender.clock())
        ended: Callable[[TransferEnd], None] = partial(self._ended, transfer_id)
        sender.open_transfer(transfer_id, answer.end, puller, ended, patience_s, with_draft=answer.with_draft)
        sender.pages_ready(transfer_id, 0, answer.end, answer.pages)
        if answer.carried:
            sender.carried_ready(transfer_id, answer.carried)
        sender.grant(link_id, PullGrant(transfer_id, answer.end, answer.with_draft))

    def _ended(self, transfer_id: TransferId, end: TransferEnd) -> None:
        self._engine.post(lambda core: core.pulls.grant_ended(transfer_id))


class TakingOver:
    """It implements services.engine.base.HandsOver for an engine that was started.

    TakeOver --> engine's thread: pages reserved --> a pull, as for a request --> published, cached
                    `--busy, no room                   `--failed, cancelled--> given back, or in quarantine
    """

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
                    within_s = min(asked.within_s, BOUNDS.most_s)
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

    async def keep(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not await self._engine.ask(_keep_all):
                    await asyncio.sleep(_KEPT_EVERY_S)
        except TimeoutError:
            log.warning("kv_not_all_kept within_s=%g", within_s)
        finally:
            self._engine.post(_keep_no_more)


def _keep_all(core: EngineCore) -> bool:
    """Have all that is cached stored; return whether it is."""
    if core.tiers is None:
        return True
    core.tiers.storing.keep_all(True)
    return core.tiers.storing.has_kept_all


def _keep_no_more(core: EngineCore) -> None:
    if core.tiers is not None:
        core.tiers.storing.keep_all(False)


def _end(seq: Sequence, core: EngineCore) -> tuple[int, int]:
    """End the sequence; return the tokens that are held here now, and those for which there is space."""
    taking = core.pulls.taking
    taking.end(seq)
    return taking.held_tokens(seq), taking.room_tokens(seq)
