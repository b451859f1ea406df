"""The tokens of one request, over as many ranks as it takes.

its turn -> placed -> started on a decode rank -> outputs
   ^                                     |
   +------ a rank failed: place again, --+
           with the output so far

A request with penalties ends instead where its engine would not count them over that output.
"""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable

from services import telemetry
from services.errors import (
    DeadlineExceeded,
    IsthmusError,
    NoCapacity,
    PeerFailed,
    StaleGeneration,
    Unavailable,
)
from services.request import FinishReason, GenerationRequest, Output, StartCommand
from services.router.cluster import Cluster, HashedPrompt, Placed
from services.router.decode_client import DecodeRankLost, OutputStream
from services.router.metrics import RouterMetrics
from services.router.progress import Checked, Progress
from services.wire.packed_ids import PackedIds

log = logging.getLogger(__name__)

# After these another rank may do; the class says which rank to leave out.
_DECODE_FAILED = (DecodeRankLost, StaleGeneration, Unavailable)
# From a placement that came so far the stream goes on as if nothing had failed before. The first token is the
# prefill's: a request that breaks every decode rank gets that one each time, and must not go round them all.
_PROGRESS_TOKENS = 2
_STUMBLE_S = 1.1  # a little longer than a rank is left alone that failed once


class FailoverStream:
    """One request's. What becomes of it is noted in `progress`, whose owner closes the stream in the end."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: RouterMetrics,
        checked: Checked,
        prompt: PackedIds,
        progress: Progress,
        *,
        eos_token_ids: tuple[int, ...],
        deadline: float,
        max_attempts: int,
        allowed_wait_s: Callable[[float], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline` is on `clock`; `allowed_wait_s` says how long the request may wait for its turn, of the
        seconds that it has left."""
        self._cluster = cluster
        self._metrics = metrics
        self._checked = checked
        self._prompt = prompt
        self._progress = progress
        self._eos_token_ids = eos_token_ids
        self._deadline = deadline
        self._max_attempts = max_attempts
        self._allowed_wait_s = allowed_wait_s
        self._clock = clock

    async def next(self) -> Output:
        """From the current rank; when it fails, from the next one.

        Raises:
            NoCapacity: the request would wait too long for its turn.
            Unavailable, PeerFailed, StaleGeneration: no rank can take it, or too many failed.
            DeadlineExceeded: the deadline has passed.
        """
        while True:
            try:
                if self._progress.stream is None:
                    prompt = await self._hashed()
                    await self._turn(prompt)
                    if self._progress.aborted:  # while it was with no rank
                        return Output(finished=FinishReason.ABORTED)
                    self._place(prompt)
                assert self._progress.stream is not None
                return await self._read(self._progress.stream)
            except (PeerFailed, StaleGeneration, Unavailable, NoCapacity) as error:
                if self._only_failed_ones_are_left(error):
                    await self._give_time(error)
                else:
                    self._leave(error)

    async def _read(self, stream: OutputStream) -> Output:
        """What has come since the last time, in one: a router that is behind has less to do for each token.

        Where a stop string may end the request, it is one at a time, to end with its last token.
        """
        self._remaining_s()  # though there be tokens
        return await stream.next(all_at_once=not self._checked.sampling.stop)

    async def _hashed(self) -> HashedPrompt:
        """The prompt, and what was generated so far."""
        began = self._clock()
        ids = self._prompt.ids + array("I", self._progress.output_ids)
        prompt = await self._cluster.hash(ids, self._checked.tenant)
        self._progress.route_s += self._clock() - began
        return prompt

    async def _turn(self, prompt: HashedPrompt) -> None:
        await self._cluster.turn(prompt, self._checked.memory_key, frozenset(self._progress.excluded))

    def _place(self, prompt: HashedPrompt) -> None:
        """Choose ranks and send the request there. Raises as `Cluster.place`."""
        progress, checked = self._progress, self._checked
        began = self._clock()
        # What was begun is not refused any more.
        is_first, remaining_s = progress.attempts == 0, self._remaining_s()
        max_wait_s = self._allowed_wait_s(remaining_s) if is_first else math.inf
        progress.attempts += 1
        progress.tokens_when_placed = len(progress.output_ids)
        placed = self._cluster.place(prompt, checked.memory_key, frozenset(progress.excluded), max_wait_s)
        progress.placed = placed
        progress.stream = placed.client.start(self._command(placed), self._prompt)
        self._cluster.sent(checked.request_id, checked.memory_key, placed)
        self._metrics.placed(placed)
        now = self._clock()
        progress.route_s += now - began
        progress.sent_s = now - progress.began_s

    def _command(self, placed: Placed) -> StartCommand:
        checked = self._checked
        request = GenerationRequest(
            request_id=checked.request_id,
            prompt_ids=(),  # they go as they came
            sampling=checked.sampling,
            output_ids_so_far=tuple(self._progress.output_ids),
            cache_salt=checked.tenant,
            priority=checked.priority,
            plan=placed.plan,
            eos_token_ids=self._eos_token_ids,
        )
        traceparent = telemetry.traceparent(self._progress.span)
        return StartCommand(request, placed.prefill, self._remaining_s(), traceparent)

    def _leave(self, error: IsthmusError) -> None:
        """Give up the ranks that failed; raise when nothing is left to try."""
        progress = self._progress
        placed, stream = progress.placed, progress.stream
        progress.stream = progress.placed = None
        if stream is not None:
            stream.close()
        self._cluster.ended(self._checked.request_id)
        if placed is None or isinstance(error, NoCapacity):
            raise error
        if len(progress.output_ids) - progress.tokens_when_placed >= _PROGRESS_TOKENS:
            progress.begin_anew()
        progress.failures += 1
        chosen = placed.decision.chosen
        if isinstance(error, _DECODE_FAILED) or chosen.prefill is None:
            failed = chosen.decode.id
        else:
            failed = chosen.prefill.id
        progress.excluded.add(failed.key)
        self._cluster.failed(failed)
        progress.span.add_event("rank_failed", {"rank": str(failed), "error": str(error)})
        if progress.output_ids and self._checked.sampling.penalizes and not placed.moves_penalties:
            raise Unavailable(
                "the answer was cut off and cannot go on elsewhere, for this engine counts penalties over "
                f"its own output alone: send the request again ({error})"
            ) from error
        if progress.failures >= self._max_attempts:
            raise error
        self._metrics.moved(progress)
        telemetry.event(
            log,
            "request_moved",
            level=logging.WARNING,
            request_id=progress.request_id,
            left=failed,
            error=repr(str(error)),
        )

    def _only_failed_ones_are_left(self, error: IsthmusError) -> bool:
        progress = self._progress
        nobody = progress.placed is None and isinstance(error, Unavailable)
        return nobody and bool(progress.excluded) and not progress.gave_time

    async def _give_time(self, error: IsthmusError) -> None:
        """Let ranks that failed this request be chosen once more: a lost stream is soon there again.

        Raises `error` where the deadline comes first.
        """
        if self._remaining_s() <= _STUMBLE_S:
            raise error
        self._progress.gave_time = True
        self._progress.excluded.clear()
        await asyncio.sleep(_STUMBLE_S)

    def _remaining_s(self) -> float:
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline has passed")
        return remaining
