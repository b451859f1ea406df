"""A rank that leaves lets others take over what it has cached, and keeps its own copy until it ends.

    drained, or stopped --> what is idle is offered --> nothing runs --> what ended meanwhile is offered
                              |                     `--with --move-running what runs goes on elsewhere
                              |--undrain: the rest is not offered
                              `--the time is over, or no rank has space: the rest is lost with this rank,
                                 but for what its tier in files has stored by then

The ranks that may take it are read from etcd, once for each of the two rounds. They pull it in the same way
as for a request (engine/paged/pulls.py), so there is no second way for KV. kv/hand_over.py decides what is
offered to whom.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from services.engine.base import HandsOver
from services.kv.hand_over import HandOver, IdlePrefix
from services.kv.radix_tree import Node
from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.observe import log_lines
from services.rank.rank_metrics import HandOverMetrics
from services.values.errors import IsthmusError, Unavailable
from services.values.rank import RankAddress, TakenOver, TakeOver
from services.values.rank_reports import Registration
from services.wire import convert
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

if TYPE_CHECKING:
    from services.rank.intake import Intake

log = logging.getLogger(__name__)

Successors = Callable[[], Awaitable[list[Registration]]]

# A busy successor gets the offer again after this time, then each time after twice as long while it is busy.
_BUSY_S, _LONGEST_BUSY_S = 0.05, 1.0
_ANSWER_S = 1.0
# An offer may take this share of the time that is left, and so long in any case: a successor that is stopped
# leaves time to ask another.
_OFFER_SHARE, _LEAST_OFFER_S = 1 / 3, 2.0
_LEAST_KEEP_S = 2.0  # A tier has so long for what is cached, or what is left of the hand-over's time.


@dataclass(slots=True)
class HandOverProgress:
    handed_tokens: int = 0
    handed_bytes: int = 0
    cut_tokens: int = 0  # the ends of prefixes that did not fit
    left_tokens: int = 0  # all that is not handed over, these ends included
    successors: int = 0


class Leaving:
    def __init__(
        self,
        hands_over: HandsOver | None,
        intake: "Intake",
        hand_over_s: float,
        tls: TlsConfig | None,
        metrics: HandOverMetrics,
        *,
        moves: bool = False,
    ) -> None:
        """`moves` has running requests go on at other ranks, where one holds as much as this one does."""
        self.metrics = metrics
        self._moves = moves
        self._hands_over = hands_over
        self._intake = intake
        self._hand_over_s = hand_over_s
        self._tls = tls
        self._address: RankAddress | None = None
        self._successors: Successors | None = None
        self._context_tokens = 0
        self._task: asyncio.Task[None] | None = None
        self._asked_s: float | None = None  # An operator wants it so, until the drain is undone.
        self._progress = HandOverProgress()
        self._handed: set[Node] = set()
        self._nothing_more_ends = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Leaving {self._progress}>"

    def knows(self, address: RankAddress, successors: Successors, context_tokens: int = 0) -> None:
        """`context_tokens` are the most that a request may come to here."""
        self._address, self._successors, self._context_tokens = address, successors, context_tokens

    def begin(self, hand_over_s: float | None = None) -> None:
        """Let others take over for so many seconds.

        0 means never; None means what was asked for before, or else the rank's own setting.
        """
        if hand_over_s is not None:
            self._asked_s = hand_over_s
        limit_s = self._hand_over_s if self._asked_s is None else self._asked_s
        if limit_s <= 0 or self._hands_over is None or self._successors is None or self._task is not None:
            return
        self._progress, self._handed = HandOverProgress(), set()
        run = self._run(self._hands_over, self._successors, limit_s)
        self._task = asyncio.create_task(run, name="hand-over")

    async def ended(self, *, nothing_more_ends: bool = False) -> None:
        """Return when the hand-over is over or was never begun. `nothing_more_ends`: do not wait longer."""
        if nothing_more_ends:
            self._nothing_more_ends.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    def undo(self) -> None:
        self._asked_s = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        task = self._task
        self.undo()
        if task is not None:
            await asyncio.wait({task})

    def told(self) -> rank_pb2.HandOver | None:
        if self._task is None:
            return None
        progress = self._progress
        return rank_pb2.HandOver(
            over=self._task.done(),
            handed_tokens=progress.handed_tokens,
            handed_bytes=progress.handed_bytes,
            left_tokens=progress.left_tokens,
            successors=progress.successors,
        )

    async def _run(self, hands_over: HandsOver, successors: Successors, limit_s: float) -> None:
        clock, progress = asyncio.get_running_loop().time, self._progress
        began, intake, left_s = clock(), self._intake, 0.0
        ended_before = intake.num_ended
        try:
            left_s = limit_s - await self._round(hands_over, successors, limit_s)
            if self._moves and intake.num_running:
                await self._move_running(successors)
            if intake.num_running and not self._nothing_more_ends.is_set():
                await self._until_nothing_runs()
            if intake.num_ended > ended_before:  # They ended in the first round or during the wait.
                left_s -= await self._round(hands_over, successors, left_s)
        except IsthmusError as error:
            log_lines.event(log, "hand_over_failed", level=logging.WARNING, reason=str(error))
        except Exception:  # It is a defect of ours, which must not prevent the drain.
            log.exception("hand_over_broken")
        await hands_over.keep(max(_LEAST_KEEP_S, left_s))
        self.metrics.ended(progress.handed_tokens, progress.left_tokens)
        log_lines.event(
            log,
            "handed_over",
            handed_tokens=progress.handed_tokens,
            handed_bytes=progress.handed_bytes,
            left_tokens=progress.left_tokens,
            successors=progress.successors,
            seconds=round(clock() - began, 3),
        )

    async def _move_running(self, successors: Successors) -> None:
        """End what runs here, so that its routers place it anew. What it has computed is lent meanwhile."""
        ranks = await successors()
        await self._intake.drain(0.0, only_wait=True)  # It returns when the routers send nothing new.
        if any(rank.max_context_tokens >= self._context_tokens for rank in ranks):
            log_lines.event(log, "running_moved", requests=self._intake.num_running)
            self._intake.move_all()

    async def _until_nothing_runs(self) -> None:
        waits = [
            asyncio.create_task(self._intake.settled()),
            asyncio.create_task(self._nothing_more_ends.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _round(self, hands_over: HandsOver, successors: Successors, limit_s: float) -> float:
        """Offer what is idle and not taken yet, and return how many seconds that took.

        Raises Unavailable when the ranks cannot be listed, or the engine does not say what it has.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        listed = await _listed(hands_over, max(_ANSWER_S, limit_s))
        prefixes = [each for each in listed if each.node not in self._handed]
        self._progress.left_tokens = self._progress.cut_tokens + sum(each.tokens for each in prefixes)
        ranks = await successors() if prefixes else []
        if ranks:
            self._progress.successors = max(self._progress.successors, len(ranks))
            async with AsyncExitStack() as stack:
                await _Round(self, hands_over, ranks, prefixes, began + limit_s, stack).run()
        return clock() - began

    @property
    def address(self) -> RankAddress:
        assert self._address is not None, "it is known before anything is offered"
        return self._address

    @property
    def tls(self) -> TlsConfig | None:
        return self._tls

    def note_taken(self, prefix: IdlePrefix, more_tokens: int, taken: TakenOver) -> None:
        is_first = prefix.node not in self._handed
        self._handed.add(prefix.node)
        self._progress.handed_tokens += more_tokens
        self._progress.handed_bytes += taken.pulled_bytes
        self._progress.left_tokens -= more_tokens
        self._progress.cut_tokens += prefix.tokens * is_first - more_tokens

    def note_dropped(self, prefix: IdlePrefix, num_tokens: int) -> None:
        self._progress.left_tokens -= num_tokens
        if prefix.node in self._handed:
            self._progress.cut_tokens -= num_tokens


async def _listed(hands_over: HandsOver, limit_s: float) -> list[IdlePrefix]:
    """Return what is idle. Raises Unavailable where the engine does not answer; it may have crashed."""
    try:
        async with asyncio.timeout(limit_s):
            return await hands_over.idle_prefixes()
    except TimeoutError as error:
        raise Unavailable("the engine does not say what is cached") from error


class _Round:
    def __init__(
        self,
        leaving: Leaving,
        hands_over: HandsOver,
        ranks: list[Registration],
        prefixes: list[IdlePrefix],
        deadline_s: float,
        stack: AsyncExitStack,
    ) -> None:
        self._leaving = leaving
        self._hands_over = hands_over
        self._deadline_s = deadline_s
        self._stack = stack
        self._channels: dict[RankAddress, grpc.aio.Channel] = {}
        self._busy_s: dict[RankAddress, float] = {}  # the next wait for each successor that was busy
        self._ids: dict[IdlePrefix, tuple[int, ...]] = {}  # the ids of those for which a successor was busy
        self._plan = HandOver(prefixes, [rank.address for rank in ranks])

    async def run(self) -> None:
        asked: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                while True:
                    while (offer := self._plan.next()) is not None:
                        asked.add(asyncio.create_task(self._offer(*offer)))
                    if not asked:
                        return
                    done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        except TimeoutError:
            return  # The rest has been counted in left_tokens.
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _offer(self, prefix: IdlePrefix, successor: RankAddress) -> None:
        token_ids = self._ids.pop(prefix, None) or await self._hands_over.spell(prefix)
        if token_ids is None:
            self._leaving.note_dropped(prefix, self._plan.dropped(prefix))
            return
        try:
            taken = await self._ask(prefix, successor, token_ids)
        except IsthmusError as error:
            log_lines.event(log, "hand_over_refused", successor=successor.id, reason=str(error))
            self._plan.failed(prefix, is_out=True)
            return
        if taken.refused == "":
            self._busy_s.pop(successor, None)
            more_tokens = self._plan.taken(prefix, taken.held_tokens, taken.room_tokens)
            self._leaving.note_taken(prefix, more_tokens, taken)
        elif taken.refused == "busy":
            wait_s = self._busy_s.get(successor, _BUSY_S)
            self._busy_s[successor] = min(2 * wait_s, _LONGEST_BUSY_S)
            self._ids[prefix] = token_ids
            self._plan.busy(prefix)
            await asyncio.sleep(wait_s)
            self._plan.rested(successor)
        elif taken.refused == "no_room":
            self._plan.no_room(prefix)
        else:
            self._plan.failed(prefix, is_out=False)

    async def _ask(self, prefix: IdlePrefix, successor: RankAddress, token_ids: tuple[int, ...]) -> TakenOver:
        """Send the offer. Raises the error of the call, and ProtocolError if its answer is malformed."""
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise Unavailable("the time is over")
        within_s = min(left_s, max(_OFFER_SHARE * left_s, _LEAST_OFFER_S))
        asked = TakeOver(
            self._leaving.address,
            prefix.salt,
            token_ids,
            prefix.idle_s,
            prefix.protected_tokens,
            within_s,
        )
        stub = rank_pb2_grpc.RankStub(await self._channel(successor))
        request = convert.take_over_to_proto(asked, successor.id.generation)
        try:
            response = await stub.TakeOver(request, timeout=within_s + _ANSWER_S)
        except grpc.aio.AioRpcError as error:
            grpc_errors.heed_cancellation()
            raise grpc_errors.error_from(error) from error
        return convert.taken_over_from_proto(response)

    async def _channel(self, successor: RankAddress) -> grpc.aio.Channel:
        if successor not in self._channels:
            channel = channels.open_channel(successor.endpoint, self._leaving.tls)
            self._channels[successor] = await self._stack.enter_async_context(channel)
        return self._channels[successor]
