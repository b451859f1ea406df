"""A FailoverStream streams the tokens of one answer, from as many ranks as needed.

placed -> started on a decode rank -> outputs
  ^                                     |
  +------ a rank failed, or its pool ---+
          holds no more: place again,
          with the output so far

A request with penalties or a constraint ends instead where the engine would ignore that output. A request
that has outgrown its rank needs room for one more token, so it moves to a larger rank, and next time to one
larger still.

An AnswerContext holds what all answers of a router share.
"""

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from services.observe import log_lines, traces
from services.router.cluster import Cluster, HashedPrompt, Placed
from services.router.connections.output_stream import OutputStream
from services.router.connections.rank_connections import DecodeRankLost
from services.router.request.client_request import ClientRequest
from services.router.request.parsers import Parsers
from services.router.request.progress import Progress, PromptTurns
from services.router.request.router_metrics import RouterMetrics
from services.router.text.chat_memory import ConversationMemory
from services.router.text.tokenizer import Tokenizer
from services.values.errors import (
    DeadlineExceeded,
    IsthmusError,
    NoCapacity,
    PeerFailed,
    RankLeaves,
    StaleGeneration,
    Unavailable,
)
from services.values.request import FinishReason, Output, SamplingParams, reusable_of
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import decode_pb2


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """`allowed_wait_s` returns how long a request may wait for its turn, given the seconds that it has left.
    Deadlines are on `clock`."""

    cluster: Cluster
    tokenizer: Tokenizer
    memory: ConversationMemory
    metrics: RouterMetrics
    parsers: Parsers
    max_attempts: int
    allowed_wait_s: Callable[[ClientRequest, float], float]
    clock: Callable[[], float]


log = logging.getLogger(__name__)

# After these errors another rank may work; the class says which rank to exclude.
_DECODE_FAILED = (DecodeRankLost, StaleGeneration, Unavailable)
_STUMBLE_S = 1.1  # A rank that failed once is excluded for a little less.
# A larger rank that does not answer is back by then, or known to be gone: its lease expires after 10 s, and
# it misses three health checks.
_LARGER_RANK_S = 30.0


class FailoverStream:
    """The stream records what happens to the answer in `progress`, which its owner releases in the end."""

    def __init__(self, context: AnswerContext, progress: Progress, eos_token_ids: tuple[int, ...]) -> None:
        self._context = context
        self._cluster = context.cluster
        self._metrics = context.metrics
        self._clock = context.clock
        self._request = progress.request
        self._prompt_ids = progress.request.prompt.ids
        self._progress = progress
        self._eos_token_ids = eos_token_ids

    async def next(self) -> Output:
        """Return the next output of the current rank or, when that fails, of the next rank.

        Raises NoCapacity if the request would wait too long for its turn, DeadlineExceeded, or Unavailable,
        PeerFailed or StaleGeneration if no rank can take it, or too many failed."""
        while True:
            try:
                if self._progress.outgrown_s is not None and (reason := self._moved_on()):
                    return Output(finished=reason)
                while self._progress.stream is None:
                    await self._place()
                    if self._progress.stream is None and self._progress.aborted:
                        return Output(finished=FinishReason.ABORTED)
                return self._judged(await self._read(self._progress.stream))
            except (PeerFailed, StaleGeneration, Unavailable, NoCapacity) as error:
                placed = self._progress.placed
                if isinstance(error, RankLeaves) and placed is not None and self._can_move(placed):
                    self._move_off(placed)
                elif self._may_wait(error):
                    await self._give_time(error)
                else:
                    self._leave(error)

    def _read(self, stream: OutputStream) -> Coroutine[Any, Any, Output]:
        """Return all outputs since the last time as one, so that a slow router has less work for each token.

        Where a stop string may end the request, steps that report more than tokens are read one at a time:
        the client must not get reports of steps after its last token.
        """
        self._remaining_s()  # The deadline ends it even where tokens are left.
        return stream.next(all_at_once=not self._request.sampling.stop)

    def _judged(self, output: Output) -> Output:
        """Check an output that ended by LENGTH: perhaps only the rank's pool was full."""
        if output.finished is not FinishReason.LENGTH:
            return output
        progress = self._progress
        assert progress.placed is not None
        reason = self._length_means(len(output.token_ids))
        if reason is None and not self._can_move(progress.placed):
            reason = FinishReason.CAPACITY
        if reason is None:
            progress.outgrow(self._clock())
        return output if reason is output.finished else replace(output, finished=reason)

    def _length_means(self, new_tokens: int = 0) -> FinishReason | None:
        """Return what a rank's LENGTH means to the client; see placement/outcomes.py. `new_tokens` are not
        yet in the progress."""
        num_output = len(self._progress.output_ids) + new_tokens
        num_tokens, most = len(self._prompt_ids) + num_output, self._request.sampling.max_tokens
        return self._cluster.length_means(num_tokens, num_output, most)

    def _can_move(self, placed: Placed) -> bool:
        return placed.moves_penalties or not self._request.sampling.heeds_output

    @property
    def _sampling(self) -> SamplingParams:
        sampling = self._request.sampling
        return sampling.without_prompt_logprobs if self._progress.prompt_is_told else sampling

    async def _hashed(self) -> HashedPrompt:
        reusable_tokens, prompt = (
            reusable_of(self._sampling, len(self._prompt_ids)),
            await self._shared(),
        )
        if reusable_tokens == prompt.reusable_tokens:
            return prompt
        return replace(prompt, reusable_tokens=reusable_tokens)

    async def _shared(self) -> HashedPrompt:
        turns, output_ids = self._progress.turns, self._progress.output_ids
        if turns is None:
            return await self._hash()
        if output_ids:
            return replace(await self._hash(), answers=self._request.answers)
        if turns.prompt is None:
            turns.prompt = replace(await self._hash(), answers=self._request.answers)
        return turns.prompt

    async def _hash(self) -> HashedPrompt:
        began = self._clock()
        output_ids, most = self._progress.output_ids, self._request.sampling.max_tokens
        ids = self._prompt_ids + array("I", output_ids) if output_ids else self._prompt_ids
        more_tokens = None if most is None else most - len(output_ids)
        prompt = await self._cluster.hash(ids, self._request.scope, more_tokens)
        if self._request.adapter is not None:
            prompt = replace(prompt, adapter=self._request.adapter)
        self._progress.routed(self._clock() - began)
        return prompt

    async def _place(self) -> None:
        """Send the request to ranks, unless it is aborted or has to wait for another answer: of several
        answers whose prompt no rank has, one has it computed and the others wait.

        Raises as `Cluster.place`.
        """
        progress = self._progress
        while (turns := progress.turns) is not None and not self._has_turn(turns):
            await turns.changed(self._remaining_s())
            if progress.aborted:
                return
        prompt = await self._hashed()
        if progress.aborted:
            return
        began = self._clock()
        if turns is not None and (placed := self._at_holder(prompt, turns)) is not None:
            self._send(placed, began)
        elif turns is None or turns.lead(self._request.index):
            self._send(self._placed(prompt), began)
        else:
            await turns.changed(self._remaining_s())

    def _has_turn(self, turns: PromptTurns) -> bool:
        return bool(turns.holders(self._progress.excluded)) or turns.lead(self._request.index)

    def _send(self, placed: Placed, began: float) -> None:
        progress, request = self._progress, self._request
        progress.place(placed)
        progress.own(placed.client.start(self._message(placed), request.prompt))
        self._cluster.sent(request.answer_key, request.memory_key, placed)
        self._metrics.placed(placed)
        now = self._clock()
        progress.routed(now - began)
        progress.sent(now)

    def _placed(self, prompt: HashedPrompt) -> Placed:
        """Choose ranks. Where some failed this request, ranks of other workers are preferred: a failure often
        ends all ranks of a worker, and the router learns of them one by one. Raises as `Cluster.place`."""
        key, failed = self._request.memory_key, frozenset(self._progress.excluded)
        # A request that has begun is not refused any more.
        is_first = self._progress.attempts == 0 and self._request.index == 0
        self._progress.attempt()
        max_wait_s = math.inf
        if is_first:
            max_wait_s = self._context.allowed_wait_s(self._request, self._remaining_s())
        if failed:
            with suppress(Unavailable, NoCapacity):
                return self._cluster.place(prompt, key, self._cluster.siblings(failed), max_wait_s)
        return self._cluster.place(prompt, key, failed, max_wait_s)

    def _at_holder(self, prompt: HashedPrompt, turns: PromptTurns) -> Placed | None:
        """Place the answer where another one has the prompt, or return None where no such rank takes it."""
        key, failed = self._request.memory_key, frozenset(self._progress.excluded)
        for holder in turns.holders(failed):
            with suppress(Unavailable):
                placed = self._cluster.place_at(prompt, key, failed, holder)
                self._progress.attempt()
                return placed
        return None

    def _message(self, placed: Placed) -> decode_pb2.Start:
        request, prefill, source = self._request, placed.prefill, placed.source
        return decode_pb2.Start(
            request_id=request.answer_name,
            output_ids_so_far=self._progress.output_ids,
            sampling=convert_request.sampling_to_proto(self._sampling),
            cache_salt=request.salt,
            priority=request.priority,
            plan=convert.plan_to_proto(placed.plan),
            prefill=None if prefill is None else convert.address_to_proto(prefill),
            timeout_s=self._remaining_s(),
            eos_token_ids=self._eos_token_ids,
            traceparent=traces.traceparent(self._progress.span),
            pull_from=None if source is None else convert.source_to_proto(source),
            share=convert_request.share_to_proto(request.share),
            adapter=None if request.adapter is None else convert.adapter_to_proto(request.adapter),
            left_s=self._remaining_s() if request.heeds_deadline else None,
            coming=convert_request.coming_to_proto(placed.coming),
        )

    def _withdraw(self) -> Placed | None:
        placed = self._progress.withdraw()
        self._cluster.ended(self._request.answer_key)
        return placed

    def _moved_on(self) -> FinishReason | None:
        """Leave a rank that is full. Return the reason to end instead, if there is no larger rank now."""
        if self._progress.stream is None:  # It waits for a larger rank.
            return self._length_means()
        progress, placed = self._progress, self._withdraw()
        assert placed is not None
        left = placed.decision.chosen.decode.id
        num_tokens = len(self._prompt_ids) + len(progress.output_ids)
        progress.note("rank_outgrown", {"rank": str(left), "tokens": num_tokens})
        self._metrics.moved("outgrown")
        log_lines.event(
            log, "request_moved_on", request_id=self._request.answer_name, left=left, tokens=num_tokens
        )
        return None

    def _move_off(self, placed: Placed) -> None:
        """Leave a rank that leaves. It still lends what it has computed."""
        progress, left = self._progress, placed.decision.chosen.decode.id
        self._withdraw()
        if progress.turns is not None:
            progress.turns.lost(left)
        progress.note("rank_leaves", {"rank": str(left)})
        self._metrics.moved("drained")
        log_lines.event(log, "request_moved_off", request_id=self._request.answer_name, left=left)

    def _leave(self, error: IsthmusError) -> None:
        """Leave the ranks that failed; raise when no other rank is left to try."""
        progress = self._progress
        placed = self._withdraw()
        if placed is None or isinstance(error, NoCapacity):
            raise error
        chosen = placed.decision.chosen
        if isinstance(error, _DECODE_FAILED) or chosen.prefill is None:
            failed = chosen.decode.id
        else:
            failed = chosen.prefill.id
        progress.fail(failed)
        self._cluster.failed(failed)
        progress.note("rank_failed", {"rank": str(failed), "error": str(error)})
        if progress.output_ids and not self._can_move(placed):
            raise Unavailable(
                "the answer was cut off and cannot go on elsewhere: this engine heeds its own output alone "
                f"for penalties and constraints: send the request again ({error})"
            ) from error
        if progress.failures >= self._context.max_attempts:
            raise error
        self._metrics.moved("retry" if progress.first_token_s is None else "migration")
        log_lines.event(
            log,
            "request_moved",
            level=logging.WARNING,
            request_id=self._request.answer_name,
            left=failed,
            error=repr(str(error)),
        )

    def _may_wait(self, error: IsthmusError) -> bool:
        """Return whether the ranks left failed this request, or are larger but unavailable for now."""
        progress = self._progress
        if progress.placed is not None or not isinstance(error, Unavailable):
            return False
        if progress.outgrown_s is not None:
            return self._clock() < progress.outgrown_s + _LARGER_RANK_S
        return bool(progress.excluded) and not progress.gave_time

    async def _give_time(self, error: IsthmusError) -> None:
        """Allow ranks that failed this request once more: a lost stream is soon connected again. Raises
        `error` where the deadline comes first."""
        if self._remaining_s() <= _STUMBLE_S:
            raise error
        self._progress.give_time()
        await asyncio.sleep(_STUMBLE_S)

    def _remaining_s(self) -> float:
        remaining = self._request.deadline - self._clock()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline has passed")
        return remaining
